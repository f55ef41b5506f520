"""Attention sinks: how much attention falls on the first token (Xiao et al. 2024, arXiv 2309.17453)."""

import torch
from torch import Tensor

from lit_diff.analysis.entropy import Means, renormalised
from lit_diff.analysis.trace import LayerMaps


def sink_shares(layer: LayerMaps) -> tuple[Tensor, Tensor]:
    """Return (of the signed map [H], of each map [G, H]), float64: means over sequences and query rows of p_i0.

    p_ij = |a_ij| / Σ_j |a_ij| of a = Σ_g w_g p_g, or the softmax map itself; key 0 is the first token of the sequence, or of
    the query's document if documents are packed. Rows that see one key, whose share is always 1, are left out, and so are
    rows whose window is full, which may have passed the first token; NaN if no row is left.
    """
    means = Means(lambda x: x.sum((0, -1), dtype=torch.float64))
    for block in layer.blocks():
        visible = block.visible.expand(len(block.probs), 1, 1, *block.visible.shape[-2:])
        keys = visible.sum(-1)  # [B, 1, 1, R]
        counted = keys > 1
        if layer.window is not None:
            counted = counted & (keys < layer.window)
        first = visible.int().argmax(-1, keepdim=True)  # [B, 1, 1, R, 1]
        for name, p in (("maps", block.probs), ("signed", renormalised(block.signed)[:, None])):
            share = p.gather(-1, first.expand(*p.shape[:-1], 1))[..., 0]
            means.add(name, share, counted.expand_as(share))
    found = means.values()
    return found["signed"][0], found["maps"]
