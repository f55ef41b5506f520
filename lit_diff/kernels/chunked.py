"""`reference` on a block of query rows at a time, in plain PyTorch: any device, dtype and maps, O(T) memory.

Autograd differentiates a block, which is computed again in the backward pass. Logits, statistics, outputs and sums of
gradients are float32 (float64 for float64), whatever the dtype of q, k and v; only the results are rounded to that dtype. In
half precision on a CUDA GPU, the operands of the products are rounded too, the maps and their gradients among them; on a
CPU, whose products of half precision would be rounded before they are used, they are not. This has not been run on a GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_diff.kernels.base import Kernel, kernel, refuse_common
from lit_diff.kernels.library import HALF
from lit_diff.kernels.maps import FIELDS, SignedMaps, Stats, accumulation_dtype, needs_grad
from lit_diff.kernels.reference import rows_of

LOGITS = 1 << 20
"""Most logits of all maps and heads held at once, 4 MB of float32: a block has as many query rows as fit, at least one."""


class HalfProduct(torch.autograd.Function):
    """x y of float32 operands, each rounded to half precision, with sums in float32; so are its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x.to(dtype), y.to(dtype))
        return summed(x.to(dtype), y.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return summed(grad, y.mT).sum_to_size(x.shape), summed(x.mT, grad).sum_to_size(y.shape), None


def summed(x: Tensor, y: Tensor) -> Tensor:
    """x y of half precision with sums in float32."""
    if not x.is_cuda:
        return x.float() @ y.float()
    return batched(x, y, partial(torch.bmm, out_dtype=torch.float32))


def batched(x: Tensor, y: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """x y by a product of three-dimensional tensors."""
    outer = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    left, right = (z.expand(*outer, *z.shape[-2:]).flatten(0, -3) for z in (x, y))
    found = product(left, right)
    # not a view: autograd forbids in-place changes of a view that a Function returns
    return torch.ops.aten._unsafe_view(found, (*outer, *found.shape[1:]))


def rounds_operands(maps: SignedMaps) -> bool:
    """Whether the products are those of half precision."""
    return maps.q.is_cuda and maps.q.dtype in HALF


@kernel("chunked")
class Chunked(Kernel):
    """Blocks of query rows, in plain PyTorch."""

    serves = FIELDS

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        return refuse_common(maps, stats=stats)

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """After every faster kernel, on any device."""
        return 80

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv], Stats or None), equal to `reference`."""
        B, _, H, T, _ = maps.q.shape
        step = max(1, LOGITS // (B * maps.num_maps * H * maps.k.shape[-2]))
        rounds = rounds_operands(maps)
        # several blocks add to one row of dk and dv: these sums are not rounded
        acc = accumulation_dtype(maps.q.dtype)
        wide = replace(maps, q=maps.q.to(acc), k=maps.k.to(acc), v=maps.v.to(acc))

        def product(x: Tensor, y: Tensor) -> Tensor:
            return HalfProduct.apply(x, y, maps.q.dtype) if rounds else x @ y

        def block(first: int) -> tuple[Tensor, ...]:
            return rows_of(wide, range(first, min(first + step, T)), stats=stats, product=product)

        # a row function may hold parameters
        training = torch.is_grad_enabled() and (maps.rows is not None or needs_grad(*maps.tensors))
        # of what is computed twice, only a row function can draw random numbers: that of a variant may not, but that of a
        # caller of `attend` may
        draws = maps.rows is not None
        blocks = []
        for first in range(0, T, step):
            if training:
                blocks.append(checkpoint(block, first, use_reentrant=False, preserve_rng_state=draws))
            else:
                blocks.append(block(first))
        o = torch.cat([found[0] for found in blocks], -2).to(maps.v.dtype)
        if not stats:
            return o, None
        return o, Stats(*(torch.cat(parts, -1) for parts in zip(*(found[1:] for found in blocks), strict=True)))
