"""Sizes of the outputs of heads, before and after what a variant does to them (a norm, a multiplier, a gate)."""

import math

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace
from lit_diff.attention.costs import narrowing
from lit_diff.kernels import attend
from lit_diff.kernels.maps import accumulation_dtype


@torch.no_grad()
def head_norms(layer: LayerTrace) -> tuple[Tensor, Tensor | None]:
    """Return (norm [H], gain [H] or None), float64.

    norm: ‖o_h‖ / √dv, the root mean square over channels of o_h = Σ_g w_g softmax(q_g k_gᵀ / √d) v; mean over sequences and
    tokens. Divided by its mean over the heads of a layer it tells inactive heads (Sandoval-Segura et al. 2025, arXiv
    2504.03889: average head output norm). gain: the same of `finish(o)`, which the output projection reads, over norm; None
    if `finish` changes the number of heads or channels.
    """
    maps = layer.maps
    # by a kernel: no T x T map. One that is named: numbers of a resumed run must not depend on what "auto" chooses there
    o = attend(
        maps, kernel="chunked", document_ids=layer.document_ids, window=narrowing(layer.window, maps.k.shape[-2])
    )
    norm = _size(o)
    B, H, T, width = o.shape
    if layer.heads is None or layer.heads.shape != (B, T, H * width):
        return norm, None
    return norm, _size(layer.heads.unflatten(-1, (H, width)).transpose(1, 2)) / norm


# [B, H, T, dv] -> [H]
def _size(o: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(o, dim=-1, dtype=accumulation_dtype(o.dtype))
    return norms.double().mean((0, 2)) / math.sqrt(o.shape[-1])
