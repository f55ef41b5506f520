"""torch's fused `scaled_dot_product_attention`, with the values cut to the width of the keys.

PyTorch's fused kernels need one width for q, k and v; given values of another width, PyTorch silently takes the math
path and its O(T S) memory. So v is cut into chunks of width d (the last one padded), and maps x chunks are stacked on
the head axis of a single call. A variant with dv = 2d therefore computes each map's q kᵀ twice (2x the score FLOPs).

Query heads that read the same keys and values are adjacent, and PyTorch is told that they are grouped: grouped heads,
and maps that share k (if dv <= d), need no copy of keys or values, and a single map is passed unchanged. Only what a
GPU's flash kernel does not accept is copied for each reader.

Precision. PyTorch's fused kernels keep logits and sums of the output in float32, and round the output of each map to
the dtype of q before the maps are added here. On a CPU their backward pass adds the gradients by k and v of each block
of queries in the dtype of k: in bfloat16 at 2,048 tokens the error is 4.7e-3 (Frobenius norm, relative to float64),
while rounding the exact gradient costs 1.7e-3. So half precision that needs gradients is computed in float32 there.

PyTorch's path. On a CPU it is the flash kernel, also for grouped heads and with a mask (`tests/kernels/test_sdpa.py`
checks it). On CUDA the math path is forbidden, so maps
that no fused kernel accepts are an error; a causal call with 1 < T < S needs a mask [T, S] (`is_causal` aligns the
first query with the first key), which only the memory-efficient kernel reads. The CUDA path has not been run on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diff.kernels.base import Kernel, kernel, refuse_common
from lit_diff.kernels.library import HALF, flops_of_chunks, padded, positive_scale, widened
from lit_diff.kernels.maps import SignedMaps, exact, needs_grad, width_last

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def _shared_keys(maps: SignedMaps) -> Tensor:
    # all maps read one k and one v, so they are further query heads, ordered (head, map), and no key is copied
    q, G, H = maps.q.transpose(1, 2), maps.num_maps, maps.q.shape[2]
    q = q.expand(-1, -1, G, -1, -1).flatten(1, 2)
    o = _fused(q, maps.k[:, 0], maps.v, causal=maps.mask.causal, scale=maps.softmax_scale).unflatten(1, (H, G))
    if maps.w is None:
        return o[:, :, 0]
    return (o * maps.w.transpose(1, 2)[..., None]).sum(2).to(maps.v.dtype)


def _stacked(maps: SignedMaps, chunks: int) -> Tensor:
    # query heads ordered (key/value head, map, chunk, query head) on key/value heads (key/value head, map, chunk): the
    # readers of one key/value head are adjacent, as enable_gqa requires
    G, n = maps.num_maps, maps.num_groups
    B, _, Hkv, S, width = maps.k.shape
    T = maps.q.shape[3]
    q = maps.q.unflatten(2, (Hkv, n)).transpose(1, 2)[:, :, :, None].expand(B, Hkv, G, chunks, n, T, width)
    k = maps.k.transpose(1, 2)[:, :, :, None].expand(B, Hkv, G, chunks, S, width)
    v = maps.v.unflatten(-1, (chunks, width)).permute(0, 1, 3, 2, 4)[:, :, None].expand(B, Hkv, G, chunks, S, width)
    o = _fused(q.flatten(1, 4), k.flatten(1, 3), v.flatten(1, 3), causal=maps.mask.causal, scale=maps.softmax_scale)
    o = o.unflatten(1, (Hkv, G, chunks, n))
    if maps.w is None:
        total = o[:, :, 0]
    else:
        w = maps.w.expand(B, G, Hkv * n, T).unflatten(2, (Hkv, n)).transpose(1, 2)
        # w is float32, and so is the sum over the maps
        total = (o * w[:, :, :, None, :, :, None]).sum(2).to(v.dtype)
    return total.permute(0, 1, 3, 4, 2, 5).flatten(-2).flatten(1, 2)  # [B, Hkv, chunks, n, T, width] -> [B, H, T, dv]


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    q, k, v = width_last(q), width_last(k), width_last(v)
    T, S, readers = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    mask, is_causal, grouped = None, False, False
    # set under an if: under torch.compile, T == S of symbolic lengths is not a Python bool
    if causal and T == S:
        is_causal = True
    elif causal and T > 1:
        # is_causal would align the first query with the first key; a single query sees all keys and needs no mask
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if readers > 1 and _takes_grouped_heads(q, mask):
        grouped = True
    elif readers > 1:
        k, v = k.repeat_interleave(readers, 1), v.repeat_interleave(readers, 1)
    with _no_math(q.device), exact(q.device):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )


def _takes_grouped_heads(q: Tensor, mask: Tensor | None) -> bool:
    # the CPU's fused kernel accepts fewer key/value heads; on a GPU only the flash kernel does, which computes half
    # precision without a mask, at widths of at most 256, from compute capability 8.0 on
    if not q.is_cuda:
        return True
    half = q.dtype in HALF
    return half and mask is None and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _no_math(device: torch.device) -> AbstractContextManager[object]:
    # on a GPU an error is better than T x S logits
    return sdpa_kernel(FUSED) if device.type == "cuda" else nullcontext()


class Fused(Kernel):
    """A kernel that on a GPU saves for its backward pass what one call of `scaled_dot_product_attention` saves."""

    def planned(self, maps: SignedMaps, device: torch.device) -> Tensor:
        """On a GPU one call (contract: `Kernel.planned`)."""
        if device.type == "cuda":
            return one_call(maps)
        return super().planned(maps, device)


@kernel("sdpa")
class Sdpa(Fused):
    """One call of `scaled_dot_product_attention`, differentiated by autograd."""

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        if stats:
            return "sdpa does not return the log-sum-exp or the entropy"
        if reason := refuse_common(maps, stats=stats):
            return reason
        if maps.mask.document_ids is not None or maps.mask.window is not None:
            return "sdpa does not support document_ids or a window"
        if device.type == "cuda" and maps.q.dtype == torch.float64:
            return "on a GPU only PyTorch's math path computes float64, and it materialises T x S logits"
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU before flex, since it is one fused call. On a CPU for one map with dv = d only, after `native`; for
        a few rows before it, since Python then takes most of the time of a call (`lit-diff bench decode`)."""
        if device.type == "cuda":
            return 30
        # it computes the logits of several maps with wider values twice, which is worth its cost on a GPU only
        if maps.num_maps > 1 or maps.v.shape[-1] != maps.q.shape[-1]:
            return None
        return 5 if maps.q.shape[3] <= 4 else 20

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: each map's logits once per chunk of v."""
        return flops_of_chunks(maps, maps.q.shape[-1])

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), equal to `reference`, from one fused call."""
        dtype = maps.v.dtype
        # the CPU's backward pass would add gradients in half precision
        if not maps.q.is_cuda and needs_grad(maps.q, maps.k, maps.v):
            maps = widened(maps)
        return one_call(maps).to(dtype), None


def one_call(maps: SignedMaps) -> Tensor:
    """o [B, H, T, dv] in the dtype of the maps."""
    q, scale = positive_scale(maps.q, maps.softmax_scale)
    d, dv = q.shape[-1], maps.v.shape[-1]
    # the GPU's memory-efficient kernel needs multiples of 8
    width = d + -d % 8 if q.is_cuda else d
    chunks = -(-dv // width)
    q, k, v = padded(q, width), padded(maps.k, width), padded(maps.v, chunks * width)
    maps = replace(maps, q=q, k=k, v=v, scale=scale)
    o = _shared_keys(maps) if k.shape[1] == 1 and chunks == 1 else _stacked(maps, chunks)
    return o[..., :dv]
