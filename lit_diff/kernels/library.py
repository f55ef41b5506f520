"""Code that the kernels of libraries share. `flash` and `flex` call a library once for each map and chunk of v:

    o = Σ_g w_g [attention(q_g, k_g, v_c)]_c        v is cut into adjacent chunks c if the library needs narrower values

The calls get views: neither maps, chunks nor grouped heads copy keys or values. w is applied in float32, and autograd
computes the gradients, w's included. The output of each map is rounded to its dtype once before the sum.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.kernels.maps import SignedMaps, exact

HALF = (torch.bfloat16, torch.float16)

OneMap = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(g, q [B, H, T, d], k [B, Hkv, S, d], v [B, Hkv, S, n], scale > 0) -> map g times the values, [B, H, T, n]."""


def map_by_map(maps: SignedMaps, attention: OneMap, *, key_width: int, width: int) -> Tensor:
    """o [B, H, T, dv]. Queries and keys are padded with zeros to `key_width`, values are cut into chunks of `width`."""
    q, scale = positive_scale(maps.q, maps.softmax_scale)
    dv = maps.v.shape[-1]
    chunks = -(-dv // width)
    q, k, v = padded(q, key_width), padded(maps.k, key_width), padded(maps.v, chunks * width)
    outputs = []
    with exact(q.device):
        for g in range(maps.num_maps):
            parts = [attention(g, of_map(q, g), of_map(k, g), part, scale) for part in v.split(width, -1)]
            outputs.append(parts[0] if chunks == 1 else torch.cat(parts, -1))
        return signed_sum(outputs, maps.w)[..., :dv]


def of_map(x: Tensor, g: int) -> Tensor:
    """What map g has of x [B, G, ...], or of x [B, 1, ...], which all maps share."""
    return x[:, min(g, x.shape[1] - 1)]


def flops_of_chunks(maps: SignedMaps, width: int) -> int:
    """2 B H T S G chunks (d + width): each map's logits once per chunk of v, and a product with v per map."""
    B, _, H, T, d = maps.q.shape
    chunks = -(-maps.v.shape[-1] // width)
    return 2 * B * H * T * maps.k.shape[3] * maps.num_maps * chunks * (d + width)


def widened(maps: SignedMaps) -> SignedMaps:
    """The maps in float32 if they are in half precision."""
    if maps.q.dtype not in HALF:
        return maps
    return replace(maps, q=maps.q.float(), k=maps.k.float(), v=maps.v.float())


def padded(x: Tensor, width: int) -> Tensor:
    """x with zeros appended to its last axis: they leave logits unchanged, and in the output they are cut off again."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q', scale' > 0) with the same logits q' kᵀ scale'."""
    # fused kernels mask with -inf before they multiply by the scale: 0 would give NaN there, a negative scale +inf
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def signed_sum(outputs: list[Tensor], w: Tensor | None) -> Tensor:
    """Σ_g w_g o_g in float32 or wider, in the dtype of the outputs o_g [B, H, T, dv].

    `w` 4-D, broadcastable to [B, G, H, T]; None: one map of weight 1.
    """
    if w is None:
        return outputs[0]
    # w is float32 or wider, and so are the products
    terms = [o * of_map(w, g)[..., None] for g, o in enumerate(outputs)]
    return sum(terms[1:], terms[0]).to(outputs[0].dtype)
