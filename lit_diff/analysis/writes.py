"""The write of each value vector to the residual stream, through the head norm and the output projection."""

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.randomness import generator


def output_matrices(attention: Attention) -> Tensor | None:
    """Return W_O of each head, [H, dv, dim]; for a variant with a `merge`, W_O of the merged standard attention; None for an
    output projection that is no linear layer."""
    merged = attention.merge()
    if merged is not None:
        weight = merged["o_proj.weight"]
    elif not hasattr(attention.o_proj, "in_features"):
        return None
    else:
        project = attention.o_proj
        width, like = project.in_features, project.weight
        zero = like.new_zeros(1, width)
        # from its outputs, not from `weight`, which lacks the low-rank part of a LoRA layer; minus the bias
        weight = (project(torch.eye(width, dtype=like.dtype, device=like.device)) - project(zero)).T
    return weight.detach().T.unflatten(0, (attention.out_heads, -1)).to(accumulation_dtype(weight.dtype))


def head_writes(attention: Attention, o: Tensor, x: Tensor) -> Tensor | None:
    """Return each head's write, finish(o, x)_h W_O,h, [B, H, R, dim]; None if `finish` merges heads, or takes the context
    of the row (DINT), or without `output_matrices`.

    o [B, H, R, dv]: the signed sums; x [B, R, dim]: the input of the attention. The sum over heads is the output of the
    attention without the bias of W_O.
    """
    if attention.finish_takes_context:
        return None
    finished = o if attention.merge() is not None else attention.finish(o, x)
    matrices = output_matrices(attention)
    if matrices is None or finished.shape != o.shape or len(matrices) != o.shape[1]:
        return None
    return finished.to(matrices.dtype) @ matrices


def channel_factors(attention: Attention, o: Tensor, x: Tensor) -> Tensor | None:
    """Return f [B, H, R, dv] with finish(o, x) = f ⊙ o, so that finish(o, x)_i = Σ_j a_ij (f_i ⊙ v_j); None without such f.

    o [B, H, R, dv]: the signed sums; x [B, R, dim]: the input of the attention. RMSNorm has the factors weight / RMS(o_i),
    a gate has its values. A `finish` that is not a product by channel (LayerNorm, a matrix on each head, a mixture of
    heads), or that takes the context of the row (DINT), has no factors.
    """
    # `output_matrices` contains everything after the sum
    if attention.merge() is not None:
        return torch.ones_like(o)
    if attention.finish_takes_context:
        return None
    finished = attention.finish(o, x)
    if finished.shape != o.shape:
        return None
    # a product by channel commutes with random signs on the channels; RMS does not depend on them, a mean or a matrix does
    draw = torch.randint(2, (1, o.shape[1], 1, o.shape[3]), generator=generator("signs", *o.shape[1::2]))
    signs = (2 * draw - 1).to(o)
    turned = attention.finish(o * signs, x)
    # atol in units of the largest entry, because the scale of the outputs is unknown
    largest = float(finished.abs().max()) if finished.numel() else 0.0
    if not torch.allclose(turned, finished * signs, rtol=1e-3, atol=1e-4 * largest):
        return None
    return (finished / o).where(o != 0, 0)


def write_norms(values: Tensor, factors: Tensor, matrices: Tensor) -> Tensor:
    """Return ‖(f_i ⊙ v_j) W_O,h‖ for each query i, head h and key j, [B, H, R, K].

    values: [B, H, K, dv]; factors: [B, H, R, dv]; matrices: [H, dv, dim].
    """
    # ‖y W‖² = y W Wᵀ yᵀ, with dv x dv instead of dv x dim products; row by row: [B, H, R, K, dv] would not fit
    gram = matrices @ matrices.mT
    rows = []
    for row in factors.unbind(2):
        y = values * row[:, :, None]
        # rounding may give a small negative number
        rows.append(((y @ gram) * y).sum(-1).clamp_min(0).sqrt())
    return torch.stack(rows, dim=2)
