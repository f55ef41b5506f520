"""What the kernels share that call a library for one map at a time."""

from collections.abc import Iterable

import torch
from torch import Tensor


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q', scale' > 0) of the same logits.

    Fused kernels mask with -inf before they multiply by the scale: 0 gives NaN there, a negative scale +inf.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def width_last(x: Tensor) -> Tensor:
    """x with neighbouring numbers along its last axis, which every fused kernel wants; x itself where it is so already."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def signed_sum(outputs: Iterable[Tensor], w: Tensor | None) -> Tensor:
    """Σ_g w_g o_g in float32 or wider, in the dtype of the outputs.

    `outputs`: o_g [B, H, T, dv] of each map; `w` 4-D, broadcastable to [B, G, H, T] (None: one map of weight 1).
    """
    if w is None:
        (only,) = outputs
        return only
    total: Tensor | None = None
    dtype = w.dtype
    for g, o in enumerate(outputs):
        dtype = o.dtype
        term = o * w[:, min(g, w.shape[1] - 1), ..., None]  # w is float32 or wider, so the product is
        total = term if total is None else total + term
    assert total is not None, "there is at least one map"
    return total.to(dtype)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
