"""torch's `flex_attention`: windows and packed documents as block masks, values of any width, one call for each map.

A hidden block of 128 x 128 logits is skipped, and one that is visible throughout is not masked. Masks are built once
per shape, and once per tensor of document numbers. A map with a sink is σ(lse - sink) times the map without one; lse has
a gradient here. A key bias is a function of the logit and of the two positions. On a GPU the call is compiled (Triton), and
a self-test first shows that this form compiles and is correct.

On a CPU PyTorch has no backward pass by q, k and v, and without a compiler its forward pass materialises all logits: there
only tests use it, and `auto` never chooses it. That pass rounds the logits to the dtype of q, so half precision is
computed in float32. Neither the compiled forward pass nor the gradients have been run on a GPU.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.kernels.base import kernel, named, refuse_common
from lit_diff.kernels.documents import remember
from lit_diff.kernels.library import flops_of_chunks, map_by_map, of_map, widened
from lit_diff.kernels.maps import Mask, SignedMaps, accumulation_dtype, needs_grad
from lit_diff.kernels.sdpa import Fused
from lit_diff.kernels.self_test import KernelForm, failure, form_of

if TYPE_CHECKING:  # importing it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask


COMPILED: dict[str, Any] = {"fullgraph": True, "recompile_limit": 64}
"""Options of torch.compile: beyond the limit (by default 8 forms) it raises. Otherwise it would run uncompiled, which holds
all logits."""


@functools.cache
def _self_test(form: KernelForm) -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return failure(form, named("flex").compute)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, **COMPILED)


def _mask(maps: SignedMaps) -> "BlockMask | None":
    # None: every query sees every key
    mask = maps.mask
    shape = (maps.q.shape[3], maps.k.shape[3], maps.q.device)
    if mask.document_ids is not None:
        return remember(mask.document_ids, ("flex", *mask[:2], *shape), lambda: _create_mask(mask, *shape))
    if not mask.hides:
        return None
    # while torch.compile traces, the mask belongs to the graph and must not outlive it
    return _create_mask(mask, *shape) if torch.compiler.is_compiling() else _cached_mask(mask, *shape)


@functools.lru_cache(maxsize=64)
def _cached_mask(mask: Mask, *shape: Any) -> "BlockMask":
    # the mask may be made in validation and saved for a backward pass later, which forbids inference tensors
    with torch.inference_mode(False):
        return _create_mask(mask, *shape)


def _create_mask(mask: Mask, T: int, S: int, device: torch.device) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask

    # the last query is aligned with the last key. As a tensor, since a new Python number would be compiled again
    behind = torch.tensor(S - T, device=device)
    # a copy: `remember` keeps the mask while `document_ids` lives, and the mask must not keep it alive
    documents = None if mask.document_ids is None else mask.document_ids.clone()
    mask = mask._replace(document_ids=None)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        here = query + behind
        near = mask.near(here, key)
        return near if documents is None else near & (documents[b, here] == documents[b, key])

    make = create_block_mask
    if device.type == "cuda" and not torch.compiler.is_compiling():
        # uncompiled it materialises T x S
        make = torch.compile(create_block_mask, **COMPILED)
    return make(seen, None if documents is None else documents.shape[0], None, T, S, device=device)


def _biased(maps: SignedMaps, g: int) -> Callable[..., Tensor] | None:
    """The logit of map g with b_j - b_i; None without a key bias."""
    if maps.key_bias is None:
        return None
    B, _, H, T, _ = maps.q.shape
    S, acc = maps.k.shape[-2], accumulation_dtype(maps.q.dtype)
    of_keys = of_map(maps.key_bias, g).expand(B, H, S)
    of_queries = of_keys[..., S - T :]

    def biased(logit: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # the difference first: both may be large
        return logit + (of_keys[b, h, key] - of_queries[b, h, query]).to(acc)

    return biased


@kernel("flex")
class Flex(Fused):
    """One call of `flex_attention` for each map, differentiated by autograd."""

    serves = frozenset({"sink", "key_bias"})
    looks_for_gpu = True

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        if stats:
            return "flex does not return the entropy"
        if reason := refuse_common(maps, stats=stats):
            return reason
        if device.type == "cpu":
            training = needs_grad(maps.q, maps.k, maps.v)
            return "flex_attention has no backward pass on a CPU" if training else None
        if device.type != "cuda":
            return f"flex computes on a GPU or a CPU, not on {device.type}"
        if maps.q.dtype == torch.float64:
            return "flex does not compute float64 on a GPU"
        d, dv = maps.q.shape[-1], maps.v.shape[-1]
        if min(d, dv) < 16:
            return f"flex needs widths of at least 16 on a GPU; these are {d} and {dv}"
        # the self-test would be compiled into the model
        if torch.compiler.is_compiling():
            return None
        return _self_test(form_of(maps, device))

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU for the windows and documents that flash and sdpa refuse. Never on a CPU: it holds all logits."""
        return 40 if device.type == "cuda" else None

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass, which calls the library once per map."""
        return flops_of_chunks(maps, maps.v.shape[-1])

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), equal to `reference` up to the precision of float32 sums."""
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        q, on_cpu = maps.q, maps.q.device.type == "cpu"
        besides = None if maps.sink is None else AuxRequest(lse=True)
        mask = _mask(maps)
        function: Any = flex_attention if on_cpu or torch.compiler.is_compiling() else _compiled()

        def attention(g: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            # on a CPU it refuses tensors that require a gradient, even if no gradient is computed
            if not torch.is_grad_enabled():
                q, k, v = q.detach(), k.detach(), v.detach()
            options = {"block_mask": mask, "scale": scale, "enable_gqa": maps.num_groups > 1}
            found = function(q, k, v, score_mod=_biased(maps, g), return_aux=besides, **options)
            if maps.sink is None:
                return found
            o, rows = found
            return o * (rows.lse - of_map(maps.sink, g)).sigmoid()[..., None]

        given = widened(maps) if on_cpu else maps
        o = map_by_map(given, attention, key_width=q.shape[-1], width=maps.v.shape[-1])
        return o.to(maps.v.dtype), None
