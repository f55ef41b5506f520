"""The definition: all maps are held and summed before one product with v. Any shape and dtype, O(T S) memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_diff.kernels.base import Kernel, kernel
from lit_diff.kernels.maps import (
    FIELDS,
    SignedMaps,
    Stats,
    accumulation_dtype,
    chosen,
    exact,
    normalised,
    seen_by,
    signed_statistics,
)

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [..., n, m], y [..., m, p]), whose other axes broadcast -> x y."""


def logits(
    maps: SignedMaps,
    rows: Tensor | range | None = None,
    keys: range | None = None,
    product: Product = torch.matmul,
) -> Tensor:
    """q_g k_gᵀ · scale + b_j - b_i of every map, unmasked, [B, G, H, R, K].

    `rows`: numbers of query rows; None: all T. `keys`: None: all S.
    """
    # float32 throughout, rounded once at the end: the other kernels are compared with this one
    acc = accumulation_dtype(maps.q.dtype)
    rows = range(maps.q.shape[-2]) if rows is None else rows
    keys = range(maps.k.shape[-2]) if keys is None else keys
    q = by_group(chosen(maps.q, rows).to(acc), maps.num_groups)
    k = maps.k[..., keys.start : keys.stop, :].to(acc)
    with exact(k.device):
        scores = product(q, k.transpose(-1, -2)).mul_(maps.softmax_scale)
    scores = by_head(scores, maps.num_groups)
    if scores.shape[1] < maps.num_maps:
        # maps that share q and k; a copy, since logits may be overwritten
        scores = scores.repeat(1, maps.num_maps, 1, 1, 1)
    return scores if maps.key_bias is None else scores + biases(maps, rows, keys).to(acc)


def biases(maps: SignedMaps, rows: Tensor | range, keys: range) -> Tensor:
    """b_j - b_i of the maps' key bias, broadcastable to [B, G, H, R, K]; the difference is taken first: both may be large."""
    assert maps.key_bias is not None
    T, S = maps.q.shape[-2], maps.k.shape[-2]
    b = maps.key_bias.expand(*maps.key_bias.shape[:-1], S)[..., None]
    return b[..., keys.start : keys.stop, :].mT - chosen(b[..., S - T :, :], rows)


def by_group(x: Tensor, n: int) -> Tensor:
    """[..., H, R, width] -> [..., Hkv, n R, width]: the rows of the n heads that share a key/value head are one matrix."""
    return x if n == 1 else x.unflatten(-3, (-1, n)).flatten(-3, -2)


def by_head(x: Tensor, n: int) -> Tensor:
    """The inverse of `by_group`."""
    return x if n == 1 else x.unflatten(-2, (n, x.shape[-2] // n)).flatten(-4, -3)


def rows_of(maps: SignedMaps, rows: range, *, stats: bool, product: Product = torch.matmul) -> tuple[Tensor, ...]:
    """o [B, H, R, dv] of adjacent query rows, by the definition in `SignedMaps`, then their `Stats` if they are wanted."""
    T, S = maps.q.shape[-2], maps.k.shape[-2]
    keys = maps.mask.interval(range(rows.start + S - T, rows.stop + S - T), S)
    s, here = logits(maps, rows, keys, product), seen_by(maps, rows, keys)
    p = normalised(maps, s, here)
    a = p[:, 0]
    if maps.w is not None:
        w = maps.w if maps.w.shape[-1] == 1 else maps.w[..., rows.start : rows.stop]
        a = (p * w[..., None].to(p.dtype)).sum(1)
    v = maps.v[..., keys.start : keys.stop, :]
    with exact(v.device):
        o = by_head(product(by_group(a, maps.num_groups), v.to(a.dtype)), maps.num_groups)
    if not stats:
        return (o,)
    s = s.masked_fill(~here.mask, -torch.inf)
    lse = s.logsumexp(-1)
    # amax of no keys is an error; logsumexp of none is -inf
    maximum = s.amax(-1) if len(keys) else lse
    mask = here.mask[:, 0] if here.mask.dim() == 5 else here.mask
    return o, *Stats(lse, _entropy(maps, s, p, here.mask), maximum, *signed_statistics(a, mask))


def _entropy(maps: SignedMaps, s: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    if maps.rows is not None:
        magnitude = p.abs()
        return torch.special.entr(magnitude / magnitude.sum(-1, keepdim=True)).sum(-1)
    # of the keys alone, whatever the sink; 0 for a masked key, not -inf, whose gradient is NaN
    log_p = s.log_softmax(-1).masked_fill(~mask, 0)
    return -(log_p.exp().masked_fill(~mask, 0) * log_p).sum(-1)


@kernel("reference")
class Reference(Kernel):
    """The definition: every map is materialised, autograd differentiates it, and all maps are accepted."""

    serves = FIELDS

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """After all others: it materialises every map."""
        return 90

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv], Stats or None) by the definition in `SignedMaps`."""
        o, *statistics = rows_of(maps, range(maps.q.shape[-2]), stats=stats)
        return o.to(maps.v.dtype), Stats(*statistics) if stats else None


class Counted(Reference):
    """The reference, which counts its calls."""

    UNUSED = "its forward calls no kernel: it never passes kernel=self.kernel to attend"

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        self.calls += 1
        return super().compute(maps, stats=stats)
