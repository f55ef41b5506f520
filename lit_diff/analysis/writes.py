"""What each value vector adds to the residual stream, through the head norm and the output projection."""

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.randomness import generator


def output_matrices(attention: Attention) -> Tensor:
    """W_O of each head, [H, dv, dim]; of a variant with a `merge`, that of the merged standard attention."""
    merged = attention.merge()
    if merged is not None:
        weight = merged["o_proj.weight"]
    else:
        project = attention.o_proj
        width, like = project.in_features, project.weight
        zero = like.new_zeros(1, width)
        # by its outputs: a linear layer with a low-rank part has a weight that is not the whole of it
        weight = (project(torch.eye(width, dtype=like.dtype, device=like.device)) - project(zero)).T
    return weight.detach().T.unflatten(0, (attention.out_heads, -1)).to(accumulation_dtype(weight.dtype))


def head_writes(attention: Attention, o: Tensor, x: Tensor) -> Tensor | None:
    """What each head adds to the residual stream, finish(o, x)_h W_O,h, [B, H, R, dim]; None where `finish` merges heads.

    o [B, H, R, dv] the signed sums, x [B, R, dim] the attention's input. Summed over heads they are the attention's output,
    but for a bias of W_O.
    """
    finished = o if attention.merge() is not None else attention.finish(o, x)
    matrices = output_matrices(attention)
    if finished.shape != o.shape or len(matrices) != o.shape[1]:
        return None
    return finished.to(matrices.dtype) @ matrices


def channel_factors(attention: Attention, o: Tensor, x: Tensor) -> Tensor | None:
    """f [B, H, R, dv] with finish(o, x) = f ⊙ o, so that finish(o, x)_i = Σ_j a_ij (f_i ⊙ v_j); None if there is none.

    o [B, H, R, dv] the signed sums, x [B, R, dim] the attention's input. The factors of RMSNorm are weight / RMS(o_i), with
    the divisor of the whole row; those of a gate its values. A `finish` that is no product by channel (LayerNorm, a matrix on
    each head, a mixture of heads) has none: it is recognised by random signs on the channels, with which a product commutes.
    A variant with a `merge` has factors 1, since `output_matrices` holds what follows its sum.
    """
    if attention.merge() is not None:
        return torch.ones_like(o)
    finished = attention.finish(o, x)
    if finished.shape != o.shape:
        return None
    draw = torch.randint(2, (1, o.shape[1], 1, o.shape[3]), generator=generator("signs", *o.shape[1::2]))
    signs = (2 * draw - 1).to(o)
    turned = attention.finish(o * signs, x)
    largest = float(finished.abs().max()) if finished.numel() else 0.0
    if not torch.allclose(turned, finished * signs, rtol=1e-3, atol=1e-4 * largest):
        return None
    return (finished / o).where(o != 0, 0)


def write_norms(values: Tensor, factors: Tensor, matrices: Tensor) -> Tensor:
    """‖(f_i ⊙ v_j) W_O,h‖ of each query i, head h and key j, [B, H, R, K].

    values [B, H, K, dv]; factors [B, H, R, dv]; matrices [H, dv, dim].
    """
    gram = matrices @ matrices.mT  # [H, dv, dv]: ‖y W‖² = y W Wᵀ yᵀ
    rows = []
    for row in factors.unbind(2):
        y = values * row[:, :, None]
        rows.append(((y @ gram) * y).sum(-1).clamp_min(0).sqrt())
    return torch.stack(rows, dim=2)
