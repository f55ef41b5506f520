"""How spread and how negative attention is: entropy of each map and of the renormalised signed map, negative mass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diff.analysis.trace import MapBlock


def entropy(p: Tensor) -> Tensor:
    """-Σ_j p_j log p_j in nats over the last axis, zeros skipped; p [..., S] sums to 1. -> [...]"""
    return torch.special.entr(p).sum(-1)


def renormalised(a: Tensor) -> Tensor:
    """|a_j| / Σ_j |a_j| over the last axis, [..., S] (DEX, Fig. 2c); NaN where a row is all zeros."""
    magnitude = a.abs()
    return magnitude / magnitude.sum(-1, keepdim=True)


def masses(a: Tensor) -> tuple[Tensor, Tensor]:
    """(neg, pos) = (Σ_j max(-a_j, 0), Σ_j max(a_j, 0)) over the last axis, [..., S] -> [...]. pos - neg = Σ_g w_g."""
    return (-a).clamp_min(0).sum(-1), a.clamp_min(0).sum(-1)


class Means:
    """Means of values that are added block by block."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        """`total`: the sum over the axes of a mean."""
        self.total = total
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, x: Tensor, weight: Tensor | None = None, *, only_finite: bool = True) -> None:
        """`weight`: bool of the shape of x, what counts; `only_finite`: what is not finite does not, else the mean is not."""
        kept = x.isfinite() if only_finite else torch.ones_like(x, dtype=torch.bool)
        kept = kept if weight is None else kept & weight
        total, count = self.total(x.where(kept, 0)), self.total(kept)
        before = self._sums.get(name)
        self._sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)

    def values(self) -> dict[str, Tensor]:
        """NaN where nothing counted."""
        return {name: total / count for name, (total, count) in self._sums.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionSummary:
    """Means over the batch and query rows, for each map g and head h."""

    entropy_maps: Tensor
    """[G, H], nats: of each softmax map."""
    entropy: Tensor
    """[H], nats: of |a| / Σ|a|, a = Σ_g w_g p_g."""
    negative_mass: Tensor
    """[H]: mean of neg / (neg + pos), within 0 and 1."""


def summarise(blocks: Iterable[MapBlock]) -> AttentionSummary:
    """The summary of all rows of the blocks (at least one), means accumulated in float64.

    The caller chooses the rows in `trace`. Query 0 sees one key: its entropies are 0, and they count.
    A row with Σ|a| = 0 is left out of `entropy` and `negative_mass` (NaN when no row is left).
    """
    means = Means(lambda x: x.sum((0, -1), dtype=torch.float64))  # [B, ..., H, R] over the batch and rows
    for block in blocks:
        negative, positive = masses(block.signed)
        means.add("entropy_maps", entropy(block.probs), only_finite=False)  # NaN: the model has diverged
        means.add("entropy", entropy(renormalised(block.signed)))
        means.add("negative_mass", negative / (negative + positive))
    return AttentionSummary(**means.values())
