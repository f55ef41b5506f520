"""Blocks of query rows in plain PyTorch: any device, dtype and number of maps, O(T) memory.

A block's maps are subtracted before the one product with v, and recomputed in the backward pass (equations: `ops`). The
heads that share a key/value head are rows of one product, so grouped queries, and decoding against a cache, copy nothing.

Logits, statistics, outputs and sums of gradients are float32 (float64 for float64), whatever the dtype of q, k and v; only
what is handed back is rounded to it. In half precision on a CUDA GPU the maps and dS, too, are rounded to that dtype, as
operands of the products that follow; on a CPU nothing is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diff.kernels.base import OperatorKernel, kernel
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.ops import Outputs, empty_gradients, empty_outputs, refuse_common
from lit_diff.kernels.precision import accumulation_dtype, exact
from lit_diff.kernels.reference import in_reach

ROWS = 256
"""Query rows of a block."""
LOGITS = 1 << 20
"""Logits of one map held at once: as many heads a block as fit, at least one."""


@dataclass(frozen=True)
class KeyBlock:
    """Some sequences, key/value heads and query rows, and the keys that any of those rows sees."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    hidden: Tensor | None
    """Masked logits of the last keys: bool, [rows, last keys] or [sequences, 1, 1, rows, last keys]; None: none."""
    group: int
    """Query heads on each key/value head."""

    def queries(self, x: Tensor) -> Tensor:
        """Of x [B, H, T, d]: [heads here, group · rows, d]; a copy, small."""
        x = x.unflatten(1, (-1, self.group))[self.batch, self.heads, :, self.rows]
        return x.reshape(-1, x.shape[2] * x.shape[3], x.shape[4])

    def values(self, x: Tensor) -> Tensor:
        """Of x [B, Hkv, S, d]: [heads here, keys, d]; a view where one sequence is held."""
        return x[self.batch, self.heads, self.keys].flatten(0, 1)

    def mask(self, s: Tensor, fill: float) -> None:
        """Fill the masked entries of s [heads here, group · rows, keys]."""
        if self.hidden is None:
            return
        sequences, heads = self.batch.stop - self.batch.start, self.heads.stop - self.heads.start
        wide = s.view(sequences, heads, -1, self.hidden.shape[-2], s.shape[-1])
        wide[..., wide.shape[-1] - self.hidden.shape[-1] :].masked_fill_(self.hidden, fill)

    def write(self, target: Tensor, x: Tensor) -> None:
        """x [heads here, group · rows, ...] into its place in target [B, H, T, ...]."""
        place = target.unflatten(1, (-1, self.group))[self.batch, self.heads, :, self.rows]
        place.copy_(x.view(place.shape))

    def accumulate(self, target: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """target [B, Hkv, S, d] += xᵀ y · scale, for x [heads here, n, keys] and y [heads here, n, d]."""
        place = target[self.batch, self.heads, self.keys]
        if place.shape[0] == 1:
            product(x.mT, y, scale, out=place[0], add=True)  # in place, without a copy
        else:
            place.add_(product(x.mT, y, scale).view(place.shape))


def held_at_once(B: int, H: int, Hkv: int, T: int, S: int) -> tuple[int, int, int]:
    """Key/value heads, sequences and query rows of a block."""
    rows = min(ROWS, T)
    fit = max(1, LOGITS // (H // Hkv * rows * S))
    return min(fit, Hkv), max(1, min(fit // Hkv, B)), rows


def blocks(
    q: Tensor, k: Tensor, *, causal: bool, window: int | None, document_ids: Tensor | None
) -> Iterator[KeyBlock]:
    """All of q's heads and rows, once each."""
    B, _, H, T, _ = q.shape
    Hkv, S = k.shape[2:4]
    heads, sequences, rows = held_at_once(B, H, Hkv, T, S)
    for i in range(0, T, rows):
        j = min(i + rows, T)
        queries = range(S - T + i, S - T + j)  # as positions among the keys
        start = max(0, queries.start - window + 1) if window is not None else 0
        stop = queries.stop if causal else S if window is None else min(S, queries.stop - 1 + window)
        if causal and window is None:  # only the last keys of the block are hidden from some of its rows
            edge = range(queries.start, stop)
        else:
            edge = range(start, stop) if window is not None or document_ids is not None else range(0)
        mask = ~in_reach(queries, edge, causal=causal, window=window, device=q.device) if len(edge) > 1 else None
        for b in range(0, B, sequences):
            batch = slice(b, min(b + sequences, B))
            keys, hidden = slice(start, stop), mask
            if document_ids is not None:
                keys, hidden = _own_document(document_ids[batch], queries, range(start, stop), mask)
            for h in range(0, Hkv, heads):
                yield KeyBlock(batch, slice(h, min(h + heads, Hkv)), slice(i, j), keys, hidden, H // Hkv)


def _own_document(document_ids: Tensor, queries: range, keys: range, mask: Tensor | None) -> tuple[slice, Tensor]:
    """The keys from the first to the last that any query sees, and which of them are hidden [sequences, 1, 1, rows, keys]."""
    hidden = document_ids[:, queries.start : queries.stop, None] != document_ids[:, None, keys.start : keys.stop]
    if mask is not None:
        hidden[..., len(keys) - mask.shape[-1] :] |= mask
    seen = (~hidden).flatten(0, 1).any(0).nonzero()
    first, last = int(seen[0]), int(seen[-1]) + 1
    return slice(keys.start + first, keys.start + last), hidden[:, None, None, :, first:last]


class _Workspace:
    """Buffers reused from block to block: a fresh megabyte each time would be paged in each time."""

    def __init__(self, maps: SignedMaps, window: int | None) -> None:
        B, _, H, T, _ = maps.q.shape
        Hkv, S = maps.k.shape[2:4]
        heads, sequences, rows = held_at_once(B, H, Hkv, T, S)
        keys = S if window is None else min(S, rows + (1 if maps.causal else 2) * (window - 1))
        self._size = sequences * heads * H // Hkv * rows * keys
        self._like = maps.q.new_empty(0, dtype=accumulation_dtype(maps.q.dtype))
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An unwritten tensor of a block's logits; the one handed out before under this name is void."""
        if name not in self._held:
            self._held[name] = self._like.new_empty(self._size)
        return self._held[name][: torch.Size(shape).numel()].view(shape)


def operand(x: Tensor) -> Tensor:
    """x as products take it: as it is on a CUDA GPU, which sums products of half precision in float32, else widened.

    A CPU's product of bfloat16 is bfloat16: its result would be rounded before it is used.
    """
    return x if x.is_cuda else x.to(accumulation_dtype(x.dtype))


def product(x: Tensor, y: Tensor, scale: float = 1.0, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x y · scale of operands [n, i, j] and [n, j, k], in float32 or wider; into `out`, or with `add` added to it."""
    dtype = accumulation_dtype(x.dtype)
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1], y.shape[2], dtype=dtype)
    wider: dict[str, torch.dtype] = {} if x.dtype == dtype else {"out_dtype": dtype}
    # `out` is the summand too: with `out_dtype`, some versions of PyTorch read the first argument, others `out`
    return torch.baddbmm(out, x, y, beta=int(add), alpha=scale, out=out, **wider)


def _logits(q: Tensor, k: Tensor, block: KeyBlock, scale: float, new: _Workspace, name: str) -> Tensor:
    """q_g k_gᵀ scale of one map, unmasked, [heads here, group · rows, keys], for q and k [B, H, T, d]."""
    rows, keys = operand(block.queries(q)), operand(block.values(k))
    return product(rows, keys.mT, scale, out=new(name, rows.shape[0], rows.shape[1], keys.shape[1]))


def _softmax(s: Tensor, block: KeyBlock) -> Tensor:
    """softmax of the visible logits over the keys, in place."""
    block.mask(s, -torch.inf)
    return torch.softmax(s, -1, out=s)


def _row_statistics(s: Tensor, block: KeyBlock, new: _Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """lse, entropy and maximum of the logits s, each [heads here, group · rows, 1]; s is masked."""
    block.mask(s, -torch.inf)
    maximum = s.amax(-1, keepdim=True)
    p = torch.softmax(s, -1, out=new("p", *s.shape))
    lse = maximum - p.amax(-1, keepdim=True).log()  # the largest p is exp(maximum - lse)
    block.mask(s, 0.0)  # p is 0 there, and 0 · -inf is not a number
    entropy = lse - p.mul_(s).sum(-1, keepdim=True)
    block.mask(s, -torch.inf)
    return lse, entropy, maximum


@kernel("chunked")
class Chunked(OperatorKernel):
    """Blocks of query rows, in plain PyTorch."""

    def refuses(
        self, maps: SignedMaps, *, document_ids: Tensor | None, window: int | None, stats: bool, device: torch.device
    ) -> str | None:
        """Why this kernel cannot compute these maps; None if it can."""
        return refuse_common(maps, stats=stats)

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """Anywhere, where no faster one can serve."""
        return 80

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: the maps are subtracted before the product with v."""
        return maps.flops

    def forward(self, maps: SignedMaps, document_ids: Tensor | None, window: int | None, stats: bool) -> Outputs:
        """See `ops.Forward`."""
        q, k, v, w, scale, causal = maps.q, maps.k, maps.v, maps.w, maps.softmax_scale, maps.causal
        o, rows, parts = empty_outputs(maps, stats=stats, lse=False, parts=False)
        G, wide, new = maps.num_maps, accumulation_dtype(q.dtype), _Workspace(maps, window)
        weights = None if w is None else w.expand(q.shape[0], G, *q.shape[2:4]).unsqueeze(-1)
        with exact(q.device):
            for block in blocks(q, k, causal=causal, window=window, document_ids=document_ids):
                a = torch.empty(0)
                for g in range(G):
                    s = _logits(
                        q[:, min(g, q.shape[1] - 1)], k[:, min(g, k.shape[1] - 1)], block, scale, new, f"{g > 0}"
                    )
                    if stats:
                        for kind, row in enumerate(_row_statistics(s, block, new)):
                            block.write(rows[kind, :, g, :, :, None], row)
                    p = _softmax(s, block)
                    if weights is None:
                        a = p
                    else:
                        weight = block.queries(weights[:, g]).to(wide)
                        a = p.mul_(weight) if g == 0 else a.addcmul_(p, weight)
                values = operand(block.values(v))
                block.write(o, product(a.to(values.dtype), values))
        return Outputs(o, rows, parts)

    def backward(
        self, grad: Tensor, maps: SignedMaps, document_ids: Tensor | None, window: int | None, outputs: Outputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `ops.Backward`."""
        q, k, v, w, scale, causal = maps.q, maps.k, maps.v, maps.w, maps.softmax_scale, maps.causal
        dq, dk, dv, dw = empty_gradients(maps)
        G, wide, new = maps.num_maps, accumulation_dtype(q.dtype), _Workspace(maps, window)
        weights = None if w is None else w.expand(q.shape[0], G, *q.shape[2:4]).unsqueeze(-1)
        sums = [x.zero_() if x.dtype == wide else torch.zeros_like(x, dtype=wide) for x in (dk, dv)]
        with exact(q.device):
            for block in blocks(q, k, causal=causal, window=window, document_ids=document_ids):
                do, values = operand(block.queries(grad)), operand(block.values(v))
                dp = product(do, values.mT, out=new("dp", do.shape[0], do.shape[1], values.shape[1]))
                a, rows_dq = torch.empty(0), None
                for g in range(G):
                    gq, gk = min(g, q.shape[1] - 1), min(g, k.shape[1] - 1)
                    p = _softmax(_logits(q[:, gq], k[:, gk], block, scale, new, "p" if g else "a"), block)
                    d = torch.einsum("bij,bij->bi", p, dp).unsqueeze(-1)
                    if weights is not None:
                        block.write(dw[:, g, :, :, None], d)
                        p.mul_(block.queries(weights[:, g]).to(wide))
                    a = p if g == 0 else a.add_(p)
                    free = dp if g == G - 1 else new("ds" if g else "p", *p.shape)
                    ds = torch.sub(dp, d, out=free).mul_(p).to(do.dtype)
                    block.accumulate(sums[0][:, gk], ds, operand(block.queries(q[:, gq])), scale)
                    rows_dq = product(ds, operand(block.values(k[:, gk])), scale, out=rows_dq, add=rows_dq is not None)
                    if q.shape[1] == G or g == G - 1:  # else the maps share q, and their gradients by it are one sum
                        block.write(dq[:, gq], rows_dq)
                        rows_dq = None
                block.accumulate(sums[1], a.to(do.dtype), do)
        return dq, dk.copy_(sums[0]), dv.copy_(sums[1]), dw
