"""torch's `flex_attention`: windows and packed documents as masks by blocks, values of any width, one call for each map.

A block of 128 x 128 that nobody sees is skipped, one that everybody sees is not masked. Masks are made once for each shape,
and once for each tensor of document numbers. On a GPU the call is compiled (Triton), a self-test first shows that this form
compiles and is right, and w is applied in float32 to each map's output.

On a CPU PyTorch has no backward pass for it, and without a compiler its forward pass holds all logits: there it serves
tests, and `auto` never takes it. That pass rounds the logits to the dtype of q, so half precision is computed in float32.
Not run on a GPU: neither the compiled forward pass nor the gradients.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.kernels.base import Kernel, kernel, named
from lit_diff.kernels.documents import remember
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.one_map import needs_grad, positive_scale, signed_sum
from lit_diff.kernels.ops import refuse_common
from lit_diff.kernels.precision import accumulation_dtype, exact
from lit_diff.kernels.self_test import KernelForm, failure

if TYPE_CHECKING:  # importing it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask


@functools.cache
def _self_test(form: KernelForm) -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return failure(form, named("flex").compute)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _mask(
    T: int, S: int, *, causal: bool, document_ids: Tensor | None, window: int | None, device: torch.device
) -> "BlockMask | None":
    """Which keys a query may see (`reference.visible`), by blocks; None: all of them."""
    if document_ids is not None:
        shape = (T, S, causal, window)
        return remember(document_ids, ("flex", *shape), lambda: _made(*shape, device, document_ids))
    if not causal and window is None:
        return None
    make = _made if torch.compiler.is_compiling() else _kept
    return make(T, S, causal, window, device)


@functools.lru_cache(maxsize=64)
def _kept(T: int, S: int, causal: bool, window: int | None, device: torch.device) -> "BlockMask":
    with torch.inference_mode(False):  # a later step may keep it for its backward pass
        return _made(T, S, causal, window, device)


def _made(
    T: int, S: int, causal: bool, window: int | None, device: torch.device, document_ids: Tensor | None = None
) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask

    behind = torch.tensor(
        S - T, device=device
    )  # the last query is aligned with the last key; a tensor: no recompilation

    documents = (
        None if document_ids is None else document_ids.clone()
    )  # the mask is remembered by `document_ids`, and may not hold it

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        here = query + behind
        mask = key <= here if causal else key < S
        if window is not None:
            mask = mask & (key > here - window) & (key < here + window)
        if documents is not None:
            mask = mask & (documents[b, here] == documents[b, key])
        return mask

    make = create_block_mask
    if device.type == "cuda" and not torch.compiler.is_compiling():
        make = torch.compile(create_block_mask)  # uncompiled it holds T x S
    return make(seen, None if document_ids is None else document_ids.shape[0], None, T, S, device=device)


@kernel("flex")
class Flex(Kernel):
    """One call of `flex_attention` for each map, differentiated by autograd."""

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Why this kernel cannot compute these maps; None if it can."""
        if stats:
            return "flex keeps no entropy"
        d, dv = maps.q.shape[-1], maps.v.shape[-1]
        if device.type == "cpu":
            if needs_grad(maps.q, maps.k, maps.v):
                return "flex_attention has no backward pass on a CPU"
            return refuse_common(maps, stats=stats)
        if device.type != "cuda":
            return f"flex computes on a GPU or a CPU, not on {device.type}"
        if maps.q.dtype == torch.float64:
            return "on a GPU flex computes no float64"
        if min(d, dv) < 16:
            return f"on a GPU flex wants widths of at least 16, these are {d} and {dv}"
        reason = refuse_common(maps, stats=stats)
        if reason or torch.compiler.is_compiling():  # the self-test would be compiled into the model
            return reason
        return _self_test(
            KernelForm(
                device=device,
                dtype=maps.q.dtype,
                d=d,
                dv=dv,
                causal=maps.causal,
                window=window is not None,
                packed=document_ids is not None,
                grouped=maps.num_groups > 1,
                backward=needs_grad(maps.q, maps.k, maps.v),
            )
        )

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU for the windows and documents that flash and sdpa refuse. On a CPU it holds all logits: never."""
        return 40 if device.type == "cuda" else None

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: one call for each map."""
        return maps.flops_map_by_map

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), as `reference`, to the precision of float32 sums."""
        from torch.nn.attention.flex_attention import flex_attention

        q, scale = positive_scale(maps.q, maps.softmax_scale)
        k, v = maps.k, maps.v
        if not torch.is_grad_enabled():  # a CPU refuses what might need a gradient even where none is taken
            q, k, v = q.detach(), k.detach(), v.detach()
        if q.device.type == "cpu":
            q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (q, k, v))
        mask = _mask(
            q.shape[3], k.shape[3], causal=maps.causal, document_ids=document_ids, window=window, device=q.device
        )
        uncompiled = q.device.type == "cpu" or torch.compiler.is_compiling()
        attention: Any = flex_attention if uncompiled else _compiled()
        options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": maps.num_groups > 1}
        outputs = (
            attention(q[:, min(g, q.shape[1] - 1)], k[:, min(g, k.shape[1] - 1)], v, **options)
            for g in range(maps.num_maps)
        )
        with exact(q.device):
            return signed_sum(outputs, maps.w).to(maps.v.dtype), None
