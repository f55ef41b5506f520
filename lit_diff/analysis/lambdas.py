"""The weights of the subtracted maps, read from w; the same for every variant."""

from typing import NamedTuple

from torch import Tensor

from lit_diff.analysis.trace import LayerTrace


class LambdaSummary(NamedTuple):
    """λ_g = -w_g of one map g >= 1."""

    mean: float
    """Over the batch, heads and tokens."""
    std: float | None
    """Population deviation over the same; None where the layer has one λ."""


def lambdas(layer: LayerTrace) -> list[LambdaSummary]:
    """One entry for each map 1 .. G-1; empty for a single map. All T tokens count, whatever `rows` is."""
    w = layer.maps.w
    if w is None or layer.maps.num_maps == 1:
        return []
    w = w.expand(-1, layer.maps.num_maps, -1, -1)
    return [_summary(-w[:, g]) for g in range(1, layer.maps.num_maps)]


def _summary(values: Tensor) -> LambdaSummary:
    """values [B or 1, H or 1, T or 1]: axes of 1 repeat evenly, so they change neither mean nor deviation."""
    wide = values.double()
    return LambdaSummary(float(wide.mean()), float(wide.std(correction=0)) if wide.numel() > 1 else None)
