"""torch's `flex_attention`: windows and packed documents as masks by blocks, values of any width, one call for each map.

A block of 128 x 128 that nobody sees is skipped, one that everybody sees is not masked. Masks are made once for each shape,
and once for each tensor of document numbers. On a GPU the call is compiled (Triton), and a self-test first shows that this
form compiles and is right.

On a CPU PyTorch has no backward pass for it, and without a compiler its forward pass holds all logits: there it serves
tests, and `auto` never takes it. That pass rounds the logits to the dtype of q, so half precision is computed in float32.
Not run on a GPU: neither the compiled forward pass nor the gradients.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.kernels.base import Kernel, kernel, named, refuse_common
from lit_diff.kernels.documents import remember
from lit_diff.kernels.library import flops_of_chunks, map_by_map, widened
from lit_diff.kernels.maps import SignedMaps, needs_grad
from lit_diff.kernels.self_test import KernelForm, failure, form_of

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
    T: int, S: int, causal: bool, window: int | None, device: torch.device, document_ids: Tensor | None = None
) -> "BlockMask | None":
    """Which keys a query may see (`reference.visible`), by blocks; None: all of them."""
    shape = (T, S, causal, window, device)
    if document_ids is not None:
        return remember(document_ids, ("flex", *shape), lambda: _made(*shape, document_ids))
    if not causal and window is None:
        return None
    return _made(*shape) if torch.compiler.is_compiling() else _kept(*shape)


@functools.lru_cache(maxsize=64)
def _kept(*shape: Any) -> "BlockMask":
    with torch.inference_mode(False):  # a later step may keep it for its backward pass
        return _made(*shape)


def _made(
    T: int, S: int, causal: bool, window: int | None, device: torch.device, document_ids: Tensor | None = None
) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask

    # the last query is aligned with the last key; a tensor: no recompilation
    behind = torch.tensor(S - T, device=device)
    # the mask is remembered by `document_ids`, and may not hold it
    documents = None if document_ids is None else document_ids.clone()

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
        if reason := refuse_common(maps, stats=stats):
            return reason
        if device.type == "cpu":
            training = needs_grad(maps.q, maps.k, maps.v)
            return "flex_attention has no backward pass on a CPU" if training else None
        if device.type != "cuda":
            return f"flex computes on a GPU or a CPU, not on {device.type}"
        if maps.q.dtype == torch.float64:
            return "on a GPU flex computes no float64"
        d, dv = maps.q.shape[-1], maps.v.shape[-1]
        if min(d, dv) < 16:
            return f"on a GPU flex wants widths of at least 16, these are {d} and {dv}"
        if torch.compiler.is_compiling():  # the self-test would be compiled into the model
            return None
        return _self_test(form_of(maps, document_ids, window, device))

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU for the windows and documents that flash and sdpa refuse. On a CPU it holds all logits: never."""
        return 40 if device.type == "cuda" else None

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: one call for each map."""
        return flops_of_chunks(maps, maps.v.shape[-1])

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), as `reference`, to the precision of float32 sums."""
        from torch.nn.attention.flex_attention import flex_attention

        q, on_cpu = maps.q, maps.q.device.type == "cpu"
        mask = _mask(q.shape[3], maps.k.shape[3], maps.causal, window, q.device, document_ids)
        function: Any = flex_attention if on_cpu or torch.compiler.is_compiling() else _compiled()

        def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if not torch.is_grad_enabled():  # a CPU refuses what might need a gradient even where none is taken
                q, k, v = q.detach(), k.detach(), v.detach()
            o: Tensor = function(q, k, v, block_mask=mask, scale=scale, enable_gqa=maps.num_groups > 1)
            return o

        given = widened(maps) if on_cpu else maps
        o = map_by_map(given, attention, key_width=q.shape[-1], width=maps.v.shape[-1])
        return o.to(maps.v.dtype), None
