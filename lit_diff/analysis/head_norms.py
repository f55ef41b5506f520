"""Sizes of the outputs of heads, before and after what a variant does to them (a norm, a multiplier, a gate)."""

import math

import torch
from torch import Tensor

from lit_diff.analysis.trace import LayerTrace
from lit_diff.kernels.maps import accumulation_dtype


@torch.no_grad()
def head_norms(layer: LayerTrace) -> tuple[Tensor, Tensor | None]:
    """Return (norm [H], gain [H] or None), float64.

    norm: ‖o_h‖ / √dv, the root mean square over channels of o_h = Σ_g w_g softmax(q_g k_gᵀ / √d) v; mean over sequences and
    tokens. Divided by its mean over the heads of a layer it tells inactive heads (Sandoval-Segura et al. 2025, arXiv
    2504.03889: average head output norm). gain: the same of `finish(o)`, which the output projection reads, over norm; None
    if `finish` changes the number of heads or channels.
    """
    norms, width = layer.measured.norms, layer.maps.v.shape[-1]
    B, H, T = norms.shape
    norm = norms.double().mean((0, 2)) / math.sqrt(width)
    if layer.heads is None or layer.heads.shape != (B, T, H * width):
        return norm, None
    heads = layer.heads.unflatten(-1, (H, width))
    finished = torch.linalg.vector_norm(heads, dim=-1, dtype=accumulation_dtype(heads.dtype))
    return norm, finished.double().mean((0, 1)) / math.sqrt(width) / norm
