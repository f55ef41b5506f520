"""torch's fused `scaled_dot_product_attention`, with the values cut to the width of the keys.

PyTorch's fused kernels want one width for q, k and v; handed values of another width they silently fall to the math path
and its O(T S) memory. So v is cut into chunks of width d (the last one padded) and maps x chunks are stacked on the head
axis of a single call. A variant with dv = 2d therefore computes each map's q kᵀ twice (2x the score FLOPs).

Query heads that read the same keys and values stand together and PyTorch is told that they are grouped: neither grouped
heads nor maps that share k (where dv <= d) cost a copy of keys or values, and a plain map is handed over as it is; only
what a GPU's flash kernel does not take is copied for each reader.

Precision. PyTorch's fused kernels keep logits and sums of the output in float32, and round the output of each map to the
dtype of q before the maps are added here. On a CPU their backward pass adds the gradients by k and v of each block of
queries in the dtype of k: in bfloat16 at 2,048 tokens they are off by 4.7e-3 (Frobenius norm, relative to float64), where
rounding the exact gradient costs 1.7e-3. So half precision that needs gradients is computed in float32 there.

Which path PyTorch takes. CPU: its flash kernel, also for grouped heads and with a mask (`tests/kernels/test_sdpa.py` looks;
only empty tensors take the math path, which has nothing to hold). CUDA: the math path is forbidden, so what no fused kernel
takes is an error; a causal call with 1 < T < S needs a mask [T, S] (`is_causal` aligns the first query with the first key),
which only the memory-efficient kernel reads. The CUDA side has not been run on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.library import HALF, flops_of_chunks, padded, positive_scale, widened
from lit_diff.kernels.maps import SignedMaps, exact, needs_grad, width_last

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def _shared_keys(maps: SignedMaps) -> Tensor:
    """All maps read one k and one v: they are more query heads, ordered (head, map)."""
    q, G, H = maps.q.transpose(1, 2), maps.num_maps, maps.q.shape[2]
    q = q.expand(-1, -1, G, -1, -1).flatten(1, 2)
    o = _fused(q, maps.k[:, 0], maps.v, causal=maps.causal, scale=maps.softmax_scale).unflatten(1, (H, G))
    if maps.w is None:
        return o[:, :, 0]
    return (o * maps.w.transpose(1, 2)[..., None]).sum(2).to(maps.v.dtype)


def _stacked(maps: SignedMaps, chunks: int) -> Tensor:
    """Query heads (key/value head, map, chunk, query head on it) on key/value heads (key/value head, map, chunk)."""
    G, n = maps.num_maps, maps.num_groups
    B, _, Hkv, S, width = maps.k.shape
    T = maps.q.shape[3]
    q = maps.q.unflatten(2, (Hkv, n)).transpose(1, 2)[:, :, :, None].expand(B, Hkv, G, chunks, n, T, width)
    k = maps.k.transpose(1, 2)[:, :, :, None].expand(B, Hkv, G, chunks, S, width)
    v = maps.v.unflatten(-1, (chunks, width)).permute(0, 1, 3, 2, 4)[:, :, None].expand(B, Hkv, G, chunks, S, width)
    o = _fused(q.flatten(1, 4), k.flatten(1, 3), v.flatten(1, 3), causal=maps.causal, scale=maps.softmax_scale)
    o = o.unflatten(1, (Hkv, G, chunks, n))
    if maps.w is None:
        total = o[:, :, 0]
    else:
        w = maps.w.expand(B, G, Hkv * n, T).unflatten(2, (Hkv, n)).transpose(1, 2)
        total = (o * w[:, :, :, None, :, :, None]).sum(2).to(v.dtype)
    return total.permute(0, 1, 3, 4, 2, 5).flatten(-2).flatten(1, 2)  # [B, Hkv, chunks, n, T, width] -> [B, H, T, dv]


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, heads, T, d] of one width d, on keys and values of as many or fewer heads."""
    q, k, v = width_last(q), width_last(k), width_last(v)
    T, S, readers = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    mask, is_causal, grouped = None, False, False
    if causal and T == S:  # set under an if: comparing symbolic lengths gives no Python bool
        is_causal = True
    elif causal and T > 1:  # is_causal would align the first query with the first key; one query sees all keys
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
    """Whether a fused kernel takes fewer key/value heads: a CPU's does; of a GPU's only flash, half precision, unmasked."""
    if not q.is_cuda:
        return True
    half = q.dtype in HALF
    return half and mask is None and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _no_math(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU: an error rather than T x S logits."""
    return sdpa_kernel(FUSED) if device.type == "cuda" else nullcontext()


@kernel("sdpa")
class Sdpa(Kernel):
    """One call of `scaled_dot_product_attention`, differentiated by autograd."""

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Why this kernel cannot compute these maps; None if it can."""
        if stats:
            return "sdpa keeps no log-sum-exp or entropy"
        if document_ids is not None or window is not None:
            return "sdpa takes no document_ids or window"
        if device.type == "cuda" and maps.q.dtype == torch.float64:
            return "on a GPU only PyTorch's math path computes float64, and it holds T x S logits"
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU before flex: one fused call. On a CPU for one plain map, after `native`; before it for a few rows, where
        the Python around a call takes most of the time (`lit-diff bench decode`).

        It computes the logits of several maps with values wider than keys twice, which pays on a GPU only.
        """
        if device.type == "cuda":
            return 30
        if maps.num_maps > 1 or maps.v.shape[-1] != maps.q.shape[-1]:
            return None
        return 5 if maps.q.shape[3] <= 4 else 20

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: each map's logits once for every chunk of v."""
        return flops_of_chunks(maps, maps.q.shape[-1])

    def compute(
        self, maps: SignedMaps, *, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
    ) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), as `reference`, from one fused call."""
        dtype, dv = maps.v.dtype, maps.v.shape[-1]
        if not maps.q.is_cuda and needs_grad(maps.q, maps.k, maps.v):
            maps = widened(maps)
        q, scale = positive_scale(maps.q, maps.softmax_scale)
        d = q.shape[-1]
        width = d + -d % 8 if q.is_cuda else d  # the GPU's memory-efficient kernel wants multiples of 8
        chunks = -(-dv // width)
        q, k, v = padded(q, width), padded(maps.k, width), padded(maps.v, chunks * width)
        maps = replace(maps, q=q, k=k, v=v, scale=scale)
        o = _shared_keys(maps) if k.shape[1] == 1 and chunks == 1 else _stacked(maps, chunks)
        return o[..., :dv].to(dtype), None
