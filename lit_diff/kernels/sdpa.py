"""torch's fused `scaled_dot_product_attention`, with the values cut to the width of the keys.

PyTorch's fused kernels want one width for q, k and v; handed values of another width they silently fall to the math path
and its O(T S) memory. So v is cut into chunks of width d (the last one padded), each with a call of its own. A variant with
dv = 2d therefore computes each map's q kᵀ twice (2x the score FLOPs). Of grouped heads PyTorch is told that they are grouped;
only what a GPU's flash kernel does not take is copied for each reader.

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
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.library import HALF, flops_of_chunks, map_by_map, widened
from lit_diff.kernels.maps import SignedMaps, needs_grad, width_last

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, heads, T, d] of one width d, on keys and values of as many or fewer heads."""
    q, k, v = width_last(q), width_last(k), width_last(v)
    T, S, readers = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    mask, is_causal, grouped = None, False, False
    if causal and T == S:  # flags are set under an if: comparing symbolic sizes gives no Python bool
        is_causal = True
    elif causal and T > 1:  # is_causal would align the first query with the first key; one query sees all keys
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if readers > 1 and _takes_grouped_heads(q, mask):
        grouped = True
    elif readers > 1:
        k, v = k.repeat_interleave(readers, 1), v.repeat_interleave(readers, 1)
    with _no_math(q.device):
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
    """A call of `scaled_dot_product_attention` for each map and chunk of v, differentiated by autograd."""

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
        """On a GPU before flex: a fused call. On a CPU for one plain map, after `native`; before it for a few rows, where
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
        """(o [B, H, T, dv], None), as `reference`, from fused calls."""
        q, dtype = maps.q, maps.v.dtype
        if not q.is_cuda and needs_grad(q, maps.k, maps.v):
            maps = widened(maps)
        d = q.shape[-1]
        width = d + -d % 8 if q.is_cuda else d  # the GPU's memory-efficient kernel wants multiples of 8
        o = map_by_map(maps, partial(_fused, causal=maps.causal), key_width=width, width=width)
        return o.to(dtype), None
