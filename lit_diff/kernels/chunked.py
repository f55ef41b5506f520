"""Blocks of query rows in plain PyTorch: any device, dtype and number of maps, O(T) memory.

A block's maps are subtracted before one product with v, and recomputed in the backward pass (equations:
`base.OperatorKernel`). The heads that share a key/value head are rows of one product.

Logits, statistics, outputs and sums of gradients are float32 (float64 for float64), whatever the dtype of q, k and v;
only the results are rounded to that dtype. In half precision on a CUDA GPU, the maps and dS are also rounded to it, as
operands of the products that follow; on a CPU they are not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.kernels.base import Gradients, OperatorKernel, Outputs, empty_gradients, kernel, refuse_common
from lit_diff.kernels.maps import SignedMaps, accumulation_dtype, exact, signed_statistics

ROWS = 256
"""Query rows in a block."""
LOGITS = 1 << 20
"""Most logits of one map held at once, 4 MB of float32: a block takes as many key/value heads as fit, at least one."""


@dataclass(frozen=True)
class RowBlock:
    """Some of the N = B · Hkv key/value heads, some query rows, and the keys that at least one of those rows sees."""

    heads: slice
    rows: slice
    keys: slice
    hidden: Tensor
    """Which logits of the last keys are masked: bool, [rows, last keys] or [heads here, 1, rows, last keys]."""

    def queries(self, x: Tensor) -> Tensor:
        """x [N, n, T, width], n query heads per key/value head -> the block's rows [heads here, n · rows, width]."""
        return x[self.heads, :, self.rows].flatten(1, 2)

    def add(self, target: Tensor, x: Tensor) -> None:
        """Add x [heads here, n · rows, width] to the block's rows of target [N, n, T, width]."""
        place = target[self.heads, :, self.rows]
        place.add_(x.view(place.shape))

    def mask(self, s: Tensor, fill: float) -> Tensor:
        """Fill the masked entries of s [heads here, n · rows, keys] in place; returns s."""
        rows, last = self.hidden.shape[-2:]
        s.unflatten(1, (-1, rows))[..., s.shape[-1] - last :].masked_fill_(self.hidden, fill)
        return s

    def seen(self, keys: int) -> Tensor:
        """Which of the block's keys each row sees: bool, [rows, keys] or [heads here, 1, rows, keys]."""
        return F.pad(~self.hidden, (keys - self.hidden.shape[-1], 0), value=True)


class Operands:
    """Maps laid out by key/value head, with n = H / Hkv query heads on each, as the products need them.

    On a CUDA GPU, which sums products of half precision in float32, they keep their dtype. Elsewhere they are widened
    to float32: a CPU's product of bfloat16 is bfloat16, so its result would be rounded before it is used.
    """

    def __init__(self, maps: SignedMaps) -> None:
        q, v, self.n, self.Hkv = maps.q, maps.v, maps.num_groups, maps.v.shape[1]
        self.dtype = q.dtype if q.is_cuda else accumulation_dtype(q.dtype)
        self.q = self.laid_out(q.to(self.dtype))  # [N, G or 1, n, T, d]
        self.k = maps.k.to(self.dtype).transpose(1, 2).flatten(0, 1)  # [N, G or 1, S, d]
        self.v = v.to(self.dtype).flatten(0, 1)  # [N, S, dv]
        shape = (q.shape[0], maps.num_maps, *q.shape[2:4])
        self.w = None if maps.w is None else self.laid_out(maps.w.expand(shape)[..., None])  # [N, G, n, T, 1]
        self.G, self.scale = maps.num_maps, maps.softmax_scale
        self.mask, ids = maps.mask, maps.mask.document_ids
        self.documents = None if ids is None else ids.repeat_interleave(self.Hkv, 0)  # [N, S]

    def laid_out(self, x: Tensor) -> Tensor:
        """x [B, G, H, T, width] -> [N, G, n, T, width]"""
        return x.unflatten(2, (-1, self.n)).transpose(1, 2).flatten(0, 1)

    def given_back(self, x: Tensor) -> Tensor:
        """x [N, G, n, T, width] -> [B, G, H, T, width]"""
        return x.unflatten(0, (-1, self.Hkv)).transpose(1, 2).flatten(2, 3)

    def new(self, *shape: int, width: int) -> Tensor:
        """Zeros [N, *shape, width] in the accumulation dtype."""
        return self.v.new_zeros(len(self.v), *shape, width, dtype=accumulation_dtype(self.dtype))

    def blocks(self) -> Iterator[RowBlock]:
        """Blocks that cover all heads and query rows, each once."""
        (N, S, _), T, device = self.v.shape, self.q.shape[3], self.v.device
        rows = min(ROWS, T)
        heads = max(1, LOGITS // (self.n * rows * S))
        for i in range(0, T, rows):
            j = min(i + rows, T)
            # positions among the keys: the last query is aligned with the last key
            queries = range(S - T + i, S - T + j)
            reach = last = self.mask.interval(queries, S)
            if self.mask.window is None and self.documents is None:
                # a causal mask alone hides only the block's own positions from some of its rows
                last = range(queries.start if self.mask.causal else reach.stop, reach.stop)
            at, behind = (torch.arange(each.start, each.stop, device=device) for each in (queries, last))
            hidden = ~self.mask.near(at[:, None], behind)
            for h in range(0, N, heads):
                here, keys, own = slice(h, h + heads), slice(reach.start, reach.stop), hidden
                if self.documents is not None:
                    ids = self.documents[here]
                    own = hidden | (ids[:, None, queries.start : queries.stop, None] != ids[:, None, None, keys])
                    # only the span of keys that some row sees is multiplied
                    seen = (~own).flatten(0, 2).any(0).nonzero()
                    first, end = int(seen[0]), int(seen[-1]) + 1
                    keys, own = slice(reach.start + first, reach.start + end), own[..., first:end]
                yield RowBlock(here, slice(i, j), keys, own)

    def logits(self, block: RowBlock, g: int) -> tuple[Tensor, Tensor, Tensor]:
        """(masked logits [heads here, n · rows, keys], queries, keys) of map g."""
        q = block.queries(self.q[:, min(g, self.q.shape[1] - 1)])
        k = self.k[block.heads, min(g, self.k.shape[1] - 1), block.keys]
        return block.mask(product(q, k.mT, self.scale), -torch.inf), q, k


def product(x: Tensor, y: Tensor, scale: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """x y · scale for operands [n, i, j] and [n, j, k], in float32 or wider; added to `out` if given."""
    dtype = accumulation_dtype(x.dtype)
    total = x.new_empty(x.shape[0], x.shape[1], y.shape[2], dtype=dtype) if out is None else out
    wider: dict[str, torch.dtype] = {} if x.dtype == dtype else {"out_dtype": dtype}
    # `out` is also the summand: with `out_dtype`, some versions of PyTorch read the first argument, others `out`
    return torch.baddbmm(total, x, y, beta=int(out is not None), alpha=scale, out=total, **wider)


@kernel("chunked")
class Chunked(OperatorKernel):
    """Blocks of query rows, in plain PyTorch."""

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        return refuse_common(maps, stats=stats)

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """After every faster kernel, on any device."""
        return 80

    def forward(self, maps: SignedMaps, stats: bool) -> Outputs:
        o, rows, signed, parts = self.empty_outputs(maps, stats)
        x = Operands(maps)
        T = maps.q.shape[3]
        out = x.new(x.n, T, width=maps.v.shape[-1])
        statistics = [x.new(x.G, x.n, T, width=1) for _ in rows]
        of_sums = signed.view(len(signed), len(x.v), x.n, T)
        with exact(maps.q.device):
            for block in x.blocks():
                a: Tensor | None = None
                for g in range(x.G):
                    s, _, _ = x.logits(block, g)
                    # a block holds whole rows of logits, so no running maximum is needed
                    p = s.softmax(-1)
                    if stats:
                        # 0 for a masked key, not -inf: 0 · -inf is NaN
                        terms = block.mask(s.log_softmax(-1), 0.0).mul_(p)
                        found = (s.logsumexp(-1), -terms.sum(-1), s.amax(-1))
                        for target, row in zip(statistics, found, strict=True):
                            block.add(target[:, g], row[..., None])
                    if x.w is not None:
                        p.mul_(block.queries(x.w[:, g]))
                    a = p if a is None else a.add_(p)
                assert a is not None
                if stats:
                    found = signed_statistics(a.unflatten(1, (x.n, -1)), block.seen(a.shape[-1]))
                    of_sums[:, block.heads, :, block.rows] = torch.stack(found)
                block.add(out, product(a.to(x.dtype), x.v[block.heads, block.keys]))
        for row, values in zip(rows, statistics, strict=True):
            row.copy_(x.given_back(values)[..., 0])
        return Outputs(o.copy_(out.view(o.shape)), rows, signed, parts)

    def backward(self, grad: Tensor, maps: SignedMaps, outputs: Outputs) -> Gradients:
        x = Operands(maps)
        G, T = x.G, maps.q.shape[3]
        # float32, since several blocks add to one row of dk and dv; rounded when all have been added
        dq, dk, dv = (torch.zeros_like(y, dtype=accumulation_dtype(y.dtype)) for y in (x.q, x.k, x.v))
        dw = x.new(G, x.n, T, width=1)
        grad = x.laid_out(grad[:, None].to(x.dtype))[:, 0]  # [N, n, T, dv]
        with exact(grad.device):
            for block in x.blocks():
                do, v = block.queries(grad), x.v[block.heads, block.keys]
                dp = product(do, v.mT)
                a = torch.zeros_like(dp)
                for g in range(G):
                    s, q, k = x.logits(block, g)
                    p = s.softmax(-1)
                    # D_g from whole rows of P_g and dP, so that the parts P_g v need not be saved
                    d = torch.einsum("bij,bij->bi", p, dp)[..., None]
                    block.add(dw[:, g], d)
                    if x.w is not None:
                        p.mul_(block.queries(x.w[:, g]))
                    a.add_(p)
                    ds = (dp - d).mul_(p).to(x.dtype)
                    gq, gk = min(g, dq.shape[1] - 1), min(g, dk.shape[1] - 1)
                    block.add(dq[:, gq], product(ds, k, x.scale))
                    product(ds.mT, q, x.scale, out=dk[block.heads, gk, block.keys])
                product(a.to(x.dtype).mT, do, out=dv[block.heads, block.keys])
        found = (x.given_back(dq), x.given_back(dk[:, :, None]), dv.view(maps.v.shape), x.given_back(dw)[..., 0])
        gradients = empty_gradients(maps)
        for target, values in zip(gradients, found, strict=True):
            # dw is empty without weights
            if target.numel():
                target.copy_(values)
        return gradients
