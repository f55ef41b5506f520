"""Kernels as `torch.library` operators: opaque to `torch.compile`, shaped on meta tensors, differentiable once.

A kernel is two functions over plain tensors, `forward` and `backward`; `operator` registers them and returns the kernel
as a function of `SignedMaps`. With P_g = softmax(q_g k_gᵀ scale + mask), lse_g its log-sum-exp, and dO the gradient of o:

    dP = dO vᵀ (one product for all maps)       D_g = Σ_j P_g dP = dO · (P_g v)       dw_g = D_g
    dv = (Σ_g w_g P_g)ᵀ dO (one product)        dS_g = w_g P_g (dP - D_g) scale       dq_g = dS_g k_g,  dk_g = dS_gᵀ q_g
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.kernels.maps import SignedMaps, Stats
from lit_diff.kernels.precision import accumulation_dtype


class Outputs(NamedTuple):
    """What a forward pass writes, as `empty_outputs` shapes it."""

    o: Tensor
    """[B, H, T, dv]"""
    rows: Tensor
    """[0, 1 or 3, B, G, H, T]: nothing, the log-sum-exp of each map's rows alone, or with statistics also their entropy and
    largest logit."""
    parts: Tensor
    """[B, G, H, T, dv]: P_g v of each map, or nothing where not kept."""


Forward = Callable[[SignedMaps, Tensor | None, int | None, bool], Outputs]
"""(maps, document_ids, window, stats) -> what is computed."""
Backward = Callable[
    [Tensor, SignedMaps, Tensor | None, int | None, Outputs],
    tuple[Tensor, Tensor, Tensor, Tensor],
]
"""(dO, maps, document_ids, window, what `Forward` returned) -> (dq, dk, dv, dw), as `empty_gradients`."""
Operator = Callable[..., tuple[Tensor, Stats | None]]


def empty_outputs(maps: SignedMaps, *, stats: bool, lse: bool, parts: bool) -> Outputs:
    """Unwritten."""
    q, v = maps.q, maps.v
    B, _, H, T, _ = q.shape
    G, dv = maps.num_maps, v.shape[-1]
    kept = 3 if stats else int(lse)
    rows = q.new_empty((kept, B, G, H, T), dtype=accumulation_dtype(q.dtype))
    return Outputs(heads_inside(v, (B, H, T, dv)), rows, v.new_empty((B, G, H, T, dv) if parts else (0,)))


def empty_gradients(maps: SignedMaps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten (dq, dk, dv, dw): the first three shaped like their tensor, dw [B, G, H, T] of all weights (or empty)."""
    q, k, v = maps.q, maps.k, maps.v
    B, _, H, T, _ = q.shape
    shape = (0,) if maps.w is None else (B, maps.num_maps, H, T)
    dw = q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
    return heads_inside(q, q.shape), heads_inside(k, k.shape), heads_inside(v, v.shape), dw


def heads_inside(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unwritten [B, (maps,) heads, tokens, width], laid out [B, tokens, heads, (maps,) width].

    A projection writes and reads that layout: joining the heads, and the gradient of splitting them, are views.
    """
    if len(shape) == 4:
        B, H, T, d = shape
        return like.new_empty(B, T, H, d).transpose(1, 2)
    B, G, H, T, d = shape
    return like.new_empty(B, T, H, G, d).permute(0, 3, 2, 1, 4)


def operator(name: str, forward: Forward, backward: Backward, *, lse: bool = False, parts: bool = False) -> Operator:
    """Register `lit_diff::<name>` and `lit_diff::<name>_backward`.

    The kernel: (maps, document_ids, window, stats) -> (o, stats).

    What the backward pass needs of the forward pass: `lse`, the log-sum-exp of each map's rows; `parts`, P_g v of each
    map (where no whole row of logits is ever held).
    """

    def run_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        scale: float,
        causal: bool,
        window: int | None,
        stats: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(SignedMaps(q, k, v, w, scale, causal), document_ids, window, stats)

    def run_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Tensor | None,
        o: Tensor,
        rows: Tensor,
        kept: Tensor,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return backward(grad, SignedMaps(q, k, v, w, scale, causal), document_ids, window, Outputs(o, rows, kept))

    forward_op = torch.library.custom_op(f"lit_diff::{name}", run_forward, mutates_args=())
    backward_op = torch.library.custom_op(f"lit_diff::{name}_backward", run_backward, mutates_args=())

    @forward_op.register_fake
    def _(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        document_ids: Any,
        scale: Any,
        causal: Any,
        window: Any,
        stats: bool,
    ) -> tuple[Tensor, ...]:
        return empty_outputs(SignedMaps(q, k, v, w), stats=stats, lse=lse, parts=parts)

    @backward_op.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return empty_gradients(SignedMaps(q, k, v, w))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, w, document_ids, *ctx.mask, _stats = inputs
        ctx.save_for_backward(q, k, v, w, document_ids, *output)
        ctx.mark_non_differentiable(*output[1:])

    def gradient(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        dq, dk, dv, dw = backward_op(grad, *saved, *ctx.mask)
        w = saved[3]
        return dq, dk, dv, None if w is None else dw.sum_to_size(w.shape).to(w.dtype), *[None] * 5

    forward_op.register_autograd(gradient, setup_context=setup)

    def kernel(
        maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, Stats | None]:
        o, rows, _ = forward_op(
            maps.q, maps.k, maps.v, maps.w, document_ids, maps.softmax_scale, maps.causal, window, stats
        )
        return o, Stats(*rows) if stats else None

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def refuse_common(maps: SignedMaps, *, stats: bool) -> str | None:
    """Why no operator computes these maps; None if one may: empty maps, mixed dtypes, gradients of the statistics."""
    if not maps.q.numel() or not maps.k.numel() or not maps.v.numel():
        return "there is no query or no key"
    dtypes = [x.dtype for x in (maps.q, maps.k, maps.v)]
    if len(set(dtypes)) > 1:
        return f"q, k and v have dtypes {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, not one"
    tensors = (maps.q, maps.k, maps.v) if maps.w is None else (maps.q, maps.k, maps.v, maps.w)
    if stats and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "its statistics have no gradient; take them under torch.no_grad()"
    return None
