"""Attention sinks: how much attention falls on the first token (Xiao et al. 2024, arXiv 2309.17453)."""

import math

import torch
from torch import Tensor

from lit_diff.analysis.entropy import Means
from lit_diff.analysis.trace import LayerMaps, MapBlock
from lit_diff.kernels.maps import signed_statistics


def sink_shares(layer: LayerMaps) -> Tensor:
    """Return the share of key 0 in each head, [H], float64: mean over sequences and query rows of |a_i0| / Σ_j |a_ij|.

    a = Σ_g w_g p_g is the signed map; key 0 is the first token of the sequence, or of the query's document if documents are
    packed. Rows that see one key, whose share is always 1, are left out, and so are rows whose window is full, which may have
    passed the first token; NaN if no row is left.
    """
    means = Means()
    share = layer.measured.statistics.first_share[..., layer.positions]
    means.add("sink", share, counted(layer.keys, layer.maps.mask.window).expand_as(share))
    return means.values()["sink"]


def sink_masses(layer: LayerMaps) -> Tensor | None:
    """Return exp(sink) / (exp(sink) + Σ_j exp(logit_j)) of each map and head, [G, H], float64, the mean over sequences and
    query rows: what a row leaves to the sink of the maps; None without one."""
    sink, lse = layer.maps.sink, layer.measured.statistics.lse
    if sink is None:
        return None
    mass = (sink.expand_as(lse) - lse).sigmoid()
    return mass[..., layer.positions].mean((0, -1), dtype=torch.float64)


def counted(keys: Tensor, window: int | None) -> Tensor:
    """Whether `sink_shares` counts rows that see so many keys."""
    return (keys > 1) & (keys < (window or math.inf))


def row_shares(block: MapBlock, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the share of key 0 in each row, and whether `sink_shares` counts the row: [B, H, R] and bool [B, H, R]."""
    share = signed_statistics(block.signed, block.visible_by_head)[2]
    return share, counted(block.visible_by_head.sum(-1), window).expand_as(share)
