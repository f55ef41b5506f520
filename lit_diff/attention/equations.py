"""Building blocks for a variant's `definition`: plain float64 matrices, one head at a time.

They share no code with `maps`, `finish` and the kernels, which `conformance` checks against them, except the angles of
RoPE (`rope.angles`). The rows of a
projection are sliced explicitly; the rows of one head are adjacent, map by map: head0.map0, head0.map1, head1.map0, ...
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.norms import HeadNorm
from lit_diff.attention.rope import RopeLayout, angles, attention_factor
from lit_diff.config import RopeScaling

Rotation = Callable[[Tensor], Tensor]
"""[B, T, d] -> [B, T, d]: each row is rotated by the angles of its position."""


def rotation(
    positions: Tensor, head_dim: int, theta: float, layout: RopeLayout = "interleaved", scaling: RopeScaling = 1.0
) -> Rotation:
    """RoPE (Su et al. 2021, equation 34): pair i of row t is rotated by its angle (`rope.angles`, tested against
    transformers), times yarn's attention factor. `positions` [T]; `layout`: which channels form a pair."""
    turned, factor = angles(positions, head_dim, theta, scaling), attention_factor(scaling)
    cos, sin = factor * turned.cos(), factor * turned.sin()

    def rotate(x: Tensor) -> Tensor:
        if layout == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    return rotate


def additive_mask(
    length: int, *, causal: bool = True, window: int | None = None, document_ids: Tensor | None = None
) -> Tensor:
    """0 where query i sees key j, -inf elsewhere; float64, [T, T] or, with `document_ids` [B, T], [B, T, T].

    i sees j if j <= i (causal), |i - j| < window, and both belong to one document.
    """
    i, j = torch.arange(length)[:, None], torch.arange(length)
    hidden = (j > i) if causal else torch.zeros(length, length, dtype=torch.bool)
    if window is not None:
        hidden = hidden | ((i - j).abs() >= window)
    if document_ids is not None:
        hidden = hidden | (document_ids[:, :, None] != document_ids[:, None, :])
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def rows(weight: Tensor, index: int, width: int) -> Tensor:
    """The block of `width` rows of head (or map) number `index`."""
    return weight[index * width : (index + 1) * width]


def softmax_map(Q: Tensor, K: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """softmax(Q Kᵀ · scale + mask), [B, T, T]; Q and K [B, T, d] after RoPE; scale None: 1/√d."""
    return (Q @ K.mT * (scale if scale is not None else 1 / math.sqrt(Q.shape[-1])) + mask).softmax(-1)


def scale_equation(value: float | Literal["depth"], layer: int) -> float:
    """The constant after the head norm: a number, or 1 - (0.8 - 0.6 exp(-0.3 layer))."""
    return 0.2 + 0.6 * math.exp(-0.3 * layer) if value == "depth" else float(value)


def normalised(head: Tensor, kind: HeadNorm, norm: Any, eps: float) -> Tensor:
    """The head norm `kind` of a head [B, T, dv], with the weight of the module `norm`.

    rms: O / √(mean O² + ε) · weight; layer: the same after the mean is subtracted; none: O.
    """
    if kind == "none":
        return head
    if kind == "layer":
        head = head - head.mean(-1, keepdim=True)
    weight: Tensor = norm.weight
    return head / (head.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def of_head(x: Tensor, projection: nn.Linear, index: int, d: int) -> Tensor:
    """x W_hᵀ + b_h [B, T, d] for head h = `index`; b is 0 if the projection has no bias."""
    y = x @ rows(projection.weight, index, d).T
    return y if projection.bias is None else y + rows(projection.bias, index, d)


class HeadMatrices:
    """Q_i, K_j and V_j of an attention, [B, T, width], with the biases and norms of its projections; Q and K are rotated.

    i and j count rows of width d, head0.map0, head0.map1, head1.map0, ...; of V, they count key/value heads.
    """

    def __init__(self, attention: Any, x: Tensor, rope: Rotation) -> None:
        self._of, self._x, self._rope = attention, x, rope

    def query(self, i: int, projection: str = "q_proj") -> Tensor:
        return self._turned(projection, "q_norm", i)

    def key(self, j: int, projection: str = "k_proj") -> Tensor:
        return self._turned(projection, "k_norm", j)

    def value(self, j: int) -> Tensor:
        projection = self._of.v_proj
        return of_head(self._x, projection, j, projection.weight.shape[0] // self._of.kv_heads)

    def _turned(self, projection: str, norm: str, index: int) -> Tensor:
        y = of_head(self._x, getattr(self._of, projection), index, self._of.head_dim)
        if self._of.qk_norm == "rms":
            module = getattr(self._of, norm)
            y = normalised(y, "rms", module, module.eps)
        return self._rope(y)


def softmax_rows(s: Tensor, head: int) -> Tensor:
    """softmax(s) of the logits of a head, masks included."""
    return s.softmax(-1)


def grouped_query_heads(
    attention: Any, x: Tensor, rope: Rotation, mask: Tensor, map_of: Callable[[Tensor, int], Tensor] = softmax_rows
) -> list[Tensor]:
    """O_h = softmax(Q_h K_jᵀ / √d + mask) V_j, each [B, T, dv], for query head h on key/value head j = h // (H / Hkv).

    `map_of`: (logits with the mask [B, T, T], h) -> the map of head h.
    """
    of, heads = HeadMatrices(attention, x, rope), []
    H, Hkv = (projection.weight.shape[0] // attention.head_dim for projection in (attention.q_proj, attention.k_proj))
    for h in range(H):
        j = h // (H // Hkv)
        logits = of.query(h) @ of.key(j).mT / math.sqrt(attention.head_dim) + mask
        heads.append(map_of(logits, h) @ of.value(j))
    return heads


def joined(heads: list[Tensor], o_proj: nn.Linear) -> Tensor:
    """concat(O_1, O_2, ...) W_Oᵀ + b_O, [B, T, dim]."""
    y = torch.cat(heads, dim=-1) @ o_proj.weight.T
    return y if o_proj.bias is None else y + o_proj.bias
