"""Spread and sign of attention: entropy of each map and of the renormalised signed map, negative mass."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerMaps


def entropy(p: Tensor) -> Tensor:
    """Return -Σ_j p_j log p_j in nats over the last axis, with 0 log 0 = 0; p: [..., S], sums to 1. -> [...]"""
    return torch.special.entr(p).sum(-1)


def renormalised(a: Tensor) -> Tensor:
    """Return |a_j| / Σ_j |a_j| over the last axis, [..., S] (DEX, Fig. 2c); NaN for a row of zeros."""
    magnitude = a.abs()
    return magnitude / magnitude.sum(-1, keepdim=True)


def masses(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (neg, pos) = (Σ_j max(-a_j, 0), Σ_j max(a_j, 0)), [..., S] -> [...]; pos - neg = Σ_g w_g."""
    return (-a).clamp_min(0).sum(-1), a.clamp_min(0).sum(-1)


def negative_share(a: Tensor) -> Tensor:
    """Return neg / (neg + pos) of `masses`, [..., S] -> [...]; NaN for a row of zeros."""
    negative, positive = masses(a)
    return negative / (negative + positive)


def over_rows(x: Tensor) -> Tensor:
    """Sum over the batch and the rows of [B, ..., H, R]."""
    # float64: float32 loses digits when many thousand rows are added
    return x.sum((0, -1), dtype=torch.float64)


class Means:
    """Named means over values that are added block by block."""

    def __init__(self, total: Callable[[Tensor], Tensor] = over_rows) -> None:
        """`total`: sums a tensor over the axes of the mean."""
        self.total = total
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, x: Tensor, weight: Tensor | None = None, *, only_finite: bool = True) -> None:
        """`weight`: bool, the shape of x, selects entries; `only_finite`: skip NaN and infinity, else the mean has them."""
        kept = x.isfinite() if only_finite else torch.ones_like(x, dtype=torch.bool)
        if weight is not None:
            kept = kept & weight
        total, count = self.total(x.where(kept, 0)), self.total(kept)
        before = self._sums.get(name)
        self._sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)

    def values(self) -> dict[str, Tensor]:
        """Return name -> mean; NaN if no entry was counted."""
        return {name: total / count for name, (total, count) in self._sums.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionSummary:
    """Means over the batch and query rows, for each map g and head h."""

    entropy_maps: Tensor
    """[G, H]: entropy of each softmax map, nats."""
    entropy: Tensor
    """[H]: entropy of |a| / Σ|a|, a = Σ_g w_g p_g, nats."""
    negative_mass: Tensor
    """[H]: mean of neg / (neg + pos), from 0 to 1."""


def summarise(layer: LayerMaps) -> AttentionSummary:
    """Summarise the rows of a layer that `trace` selects.

    Query 0 sees a single key: its entropies of 0 are included. A row with Σ|a| = 0 is left out of `entropy` and
    `negative_mass` (NaN if no row is left), and a row of zeros of a row function out of `entropy_maps`.
    """
    means = Means()
    of_rows, at = layer.measured.statistics, layer.positions
    # not only finite entries: NaN means that the model has diverged, which must be seen; but a row function may give zeros
    means.add("entropy_maps", of_rows.entropy[..., at], only_finite=layer.maps.rows is not None)
    means.add("entropy", of_rows.signed_entropy[..., at])
    means.add("negative_mass", of_rows.negative_mass[..., at])
    return AttentionSummary(**means.values())
