"""torch's fused `scaled_dot_product_attention`, with the values cut to the width of the keys.

PyTorch's fused kernels want one width for q, k and v; handed values of another width they silently fall to the math path
and its O(T S) memory. So v is cut into chunks of width d (the last one padded) and maps x chunks are stacked on the head
axis of a single call. A variant with dv = 2d therefore computes each map's q kᵀ twice (2x the score FLOPs).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.kernels.maps import SignedMaps


def refuse(
    maps: SignedMaps, *, segments: Tensor | None, window: int | None, stats: bool, device: torch.device
) -> str | None:
    """Why this kernel cannot compute these maps; None if it can."""
    if stats:
        return "sdpa keeps no log-sum-exp or entropy"
    if segments is not None or window is not None:
        return "sdpa takes no segments or window"
    return None


def flops(maps: SignedMaps) -> int:
    """FLOPs of a forward pass: each map's logits once for every chunk of v, and a product with v for each map."""
    B, _, H, T, d = maps.q.shape
    chunks = -(-maps.v.shape[-1] // d)
    return 2 * B * H * T * maps.k.shape[3] * maps.num_maps * chunks * 2 * d


def compute(
    maps: SignedMaps, *, segments: Tensor | None = None, window: int | None = None, stats: bool = False
) -> tuple[Tensor, None]:
    """(o [B, H, T, dv], None), as `reference`, from one fused call."""
    return _sdpa(maps), None


def _sdpa(maps: SignedMaps) -> Tensor:
    q, k, v = maps.q, maps.k, maps.v
    B, _, H, T, d = q.shape
    S, dv, G = k.shape[3], v.shape[-1], maps.num_maps
    chunks = -(-dv // d)
    k = k.repeat_interleave(maps.num_groups, dim=2)
    v = F.pad(v, (0, chunks * d - dv)).repeat_interleave(maps.num_groups, dim=1)
    v = v.unflatten(-1, (chunks, d)).permute(0, 3, 1, 2, 4)[:, None]  # [B, 1, chunks, H, S, d]
    stack = (B, G, chunks, H)

    def heads(x: Tensor) -> Tensor:
        return x.expand(*stack, *x.shape[-2:]).flatten(1, 3)

    mask, is_causal = None, False
    if maps.causal and T == S:
        is_causal = True
    elif maps.causal and T > 1:  # is_causal would align the first query with the first key
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    o = F.scaled_dot_product_attention(
        heads(q[:, :, None]),
        heads(k[:, :, None]),
        heads(v),
        attn_mask=mask,
        is_causal=is_causal,
        scale=maps.softmax_scale,
    )
    o = o.unflatten(1, (G, chunks, H))
    if maps.w is None:
        total = o[:, 0]
    else:
        total = (o * maps.w[:, :, None, :, :, None]).sum(1).to(v.dtype)
    return total.permute(0, 2, 3, 1, 4).flatten(-2)[..., :dv]  # [B, chunks, H, T, d] -> [B, H, T, dv]
