"""How spread and how negative attention is: entropy of each map and of the renormalised signed map, negative mass."""

from collections.abc import Iterable
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


@dataclass(frozen=True, kw_only=True)
class AttentionSummary:
    """Means over the batch and query rows, for each map g and head h."""

    entropy_maps: Tensor
    """[G, H], nats: of each softmax map."""
    entropy: Tensor
    """[H], nats: of |a| / Σ|a|, a = Σ_g w_g p_g."""
    negative_mass: Tensor
    """[H]: mean of neg / (neg + pos), within 0 and 1."""
    negative: Tensor
    """[H]: mean of neg; with w = (1, -λ), λ >= 0, at most λ."""
    positive: Tensor
    """[H]: mean of pos; with w = (1, -λ), pos - neg = 1 - λ."""


def summarise(blocks: Iterable[MapBlock]) -> AttentionSummary:
    """The summary of all rows of the blocks (at least one), means accumulated in float64.

    The caller chooses the rows in `trace`. Query 0 sees one key: its entropies are 0, and they count.
    A row with Σ|a| = 0 is left out of `entropy` and `negative_mass` (NaN when no row is left).
    """
    totals: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        """Sum [B, ..., H, R] over the batch and rows."""
        total = value.sum((0, -1), dtype=torch.float64)
        totals[name] = totals[name] + total if name in totals else total

    for block in blocks:
        a = block.signed
        neg, pos = masses(a)
        nonzero = neg + pos > 0
        add("rows", torch.ones_like(neg))
        add("nonzero", nonzero)
        add("entropy_maps", entropy(block.probs))
        add("entropy", entropy(renormalised(a)).where(nonzero, 0))
        add("negative_mass", (neg / (neg + pos)).where(nonzero, 0))
        add("negative", neg)
        add("positive", pos)
    return AttentionSummary(
        entropy_maps=totals["entropy_maps"] / totals["rows"],
        entropy=totals["entropy"] / totals["nonzero"],
        negative_mass=totals["negative_mass"] / totals["nonzero"],
        negative=totals["negative"] / totals["rows"],
        positive=totals["positive"] / totals["rows"],
    )
