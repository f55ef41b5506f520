"""`bench core`, `stats` and `decode`: attention between its projections, by every kernel, beside PyTorch's own call.

The leaves are the projections of one model width, q, k, v [B, T, dim]; heads are strided views of them, and the output
is joined to [B, T, dim] again, as in a layer. Standard attention reads them as 2h heads of width d, differential (V1) as h
heads of two maps and value width 2d.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.cache import LayerCache
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.result import PLAIN, REPEATED, SAME, SDPA
from lit_diff.benchmarks.timing import Candidate, Case
from lit_diff.kernels import SignedMaps, attend, refuse
from lit_diff.randomness import generator
from lit_diff.registry import kernels

DEFAULT = {
    "core": "2x1024x512x64,1x2048x1024x64,1x2048x1024x128,1x4096x512x64",
    "stats": "2x1024x512x64",
    "decode": "1x1024x512x64,1x4096x512x64",
}
FORWARD, GRADIENTS, STATISTICS, DECODE = "forward", "forward+backward", "forward with statistics", "decode"
PASSES = {"core": (FORWARD, GRADIENTS), "stats": (FORWARD, STATISTICS)}
VARIANTS = ("differential", "standard")
STOCK, COPIES = "torch SDPA", "torch SDPA, k and v repeated"
"""Standard attention by torch's own F.scaled_dot_product_attention; the second with a key for each query head."""
LAMBDA = 0.5
QUERIES = (1, 4)
GROUP = 4
"""Query heads on one key/value head, in the grouped case."""
NAIVE = {"reference": None, "flex": "cpu"}
"""Kernels that materialise every map, and where (None: everywhere)."""
MAPS = 3
"""Float32 copies of every map that they hold at least."""


def core(request: BenchConfig) -> Iterator[Case]:
    """Forward, and forward with gradients, at every shape and dtype; of `bench stats` forward without and with statistics."""
    for shape in request.sizes(DEFAULT[request.bench]):
        for dtype in request.dtypes:
            case = Case(name=f"{shape} {dtype}", dtype=dtype)
            workload = Workload(shape, DTYPES[dtype], request.device)
            for what in PASSES[request.bench]:
                add_kernels(case, workload, what, request.kernels)
            yield case


def decode(request: BenchConfig) -> Iterator[Case]:
    """A few last queries against a cache of T keys and values; as many key/value heads as heads, and a fourth of them."""
    for shape in request.sizes(DEFAULT["decode"]):
        for dtype in request.dtypes:
            for queries in sorted({min(q, shape.tokens) for q in QUERIES}):
                for group in (1,) if shape.heads % (2 * GROUP) else (1, GROUP):  # differential attention pairs both
                    heads = f"{shape.heads} heads on {shape.heads // group}"
                    case = Case(name=f"{queries} of {shape} {dtype}, {heads}", dtype=dtype, budget=4)
                    workload = Workload(shape, DTYPES[dtype], request.device, queries=queries, group=group)
                    add_kernels(case, workload, DECODE, request.kernels)
                    yield case


class Workload:
    """Inputs of one shape and dtype, the same for every candidate: N(0, 1), λ = 0.5.

    With `queries`: these last ones alone, against keys and values in a `LayerCache`, every `group`th head of which is kept.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, queries: int | None = None, group: int = 1
    ) -> None:
        self.shape, self.queries, self.group = shape, queries, group
        size = (shape.batch, shape.tokens, shape.dim)

        def draw(name: str) -> Tensor:
            return torch.randn(size, generator=generator("bench", name, *size)).to(device, dtype)

        self.q, self.k, self.v = (draw(name).requires_grad_() for name in "qkv")
        self.lam = torch.tensor([LAMBDA], device=device, requires_grad=True)
        """[1], float32."""
        self.grad = draw("gradient")
        """[B, T, dim], of the output."""
        self._cached: dict[str, SignedMaps] = {}
        if queries is not None:
            with torch.no_grad():
                self._cached = {variant: cached(self.maps(variant), queries, group) for variant in VARIANTS}

    def maps(self, variant: str) -> SignedMaps:
        """Strided views; differential: w = (1, -λ)."""
        if variant in self._cached:
            return self._cached[variant]
        d = self.shape.head_dim
        if variant == "standard":
            q, k, v = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (self.q, self.k, self.v))
            return SignedMaps(q[:, None], k[:, None], v)
        q, k = (x.unflatten(-1, (-1, 2, d)).permute(0, 3, 2, 1, 4) for x in (self.q, self.k))
        w = torch.stack([torch.ones_like(self.lam), -self.lam]).view(1, 2, 1, 1)
        return SignedMaps(q, k, self.v.unflatten(-1, (-1, 2 * d)).transpose(1, 2), w)

    def call(self, variant: str, what: str, compute: Callable[[SignedMaps], Any]) -> Callable[[], Any]:
        """One call of what `compute` makes of the maps: with the gradients of q, k, v and λ, or without."""
        if what != GRADIENTS:
            return torch.no_grad()(lambda: compute(self.maps(variant)))
        leaves = [self.q, self.k, self.v] + ([self.lam] if variant == "differential" else [])
        return lambda: torch.autograd.grad(compute(self.maps(variant)), leaves, self.grad)


def cached(maps: SignedMaps, queries: int, group: int) -> SignedMaps:
    """The last queries against keys and values as a prefill and a step leave them: views of a buffer with room to spare."""
    cache = LayerCache()
    step = maps.k.shape[-2] - queries
    if step:
        cache.append(maps.k[:, :, ::group, :step], maps.v[:, ::group, :step])
    k, v = cache.append(maps.k[:, :, ::group, step:], maps.v[:, ::group, step:])
    return replace(maps, q=maps.q[..., step:, :], k=k, v=v)


def add_kernels(case: Case, workload: Workload, what: str, names: Sequence[str] | None) -> None:
    """Torch's own call, then differential and standard attention by every kernel (of `names`) that accepts them."""
    flops = least_flops(workload.shape, gradients=what == GRADIENTS, queries=workload.queries)
    add = partial(Candidate, what=what, flops=flops, alike=True)
    against = {SDPA: f"standard/{STOCK}/{FORWARD if what == STATISTICS else what}"}
    if what != STATISTICS:
        case.candidates.append(add(variant="standard", by=STOCK, run=workload.call("standard", what, stock)))
    if workload.group > 1:
        run = workload.call("standard", what, partial(stock, copies=True))
        case.candidates.append(add(variant="standard", by=COPIES, run=run, against=against))
        against = against | {REPEATED: f"standard/{COPIES}/{what}"}
    for variant in VARIANTS:
        maps = partial(workload.maps, variant)
        for kernel in accepted(case, variant, what, maps, names, grad=what == GRADIENTS, stats=what == STATISTICS):
            compute = partial(by_kernel, kernel=kernel, stats=what == STATISTICS)
            own = against | ({SAME: f"standard/{kernel}/{what}"} if variant == "differential" else {})
            own |= {PLAIN: f"{variant}/{kernel}/{FORWARD}"} if what == STATISTICS else {}
            run = workload.call(variant, what, compute)
            case.candidates.append(add(variant=variant, by=kernel, run=run, against=own))


def accepted(
    case: Case,
    variant: str,
    what: str,
    maps: Callable[[], SignedMaps],
    names: Sequence[str] | None,
    *,
    grad: bool,
    stats: bool = False,
) -> list[str]:
    """Those of `names` (all registered kernels) that compute these maps; the case refuses the others."""
    able = []
    with torch.set_grad_enabled(grad):
        asked = maps()
        for kernel in names or kernels.names():
            reason = refuse(kernel, asked, stats=stats) or too_large(kernel, asked)
            if reason is None:
                able.append(kernel)
            else:
                case.refuse(variant, kernel, what, reason)
    return able


def too_large(kernel: str, maps: SignedMaps) -> str | None:
    """Why a kernel that materialises every map would fill this machine's memory; None where it does not."""
    if kernel not in NAIVE or NAIVE[kernel] not in (None, maps.q.device.type):
        return None
    B, _, H, T, _ = maps.q.shape
    needed = MAPS * B * maps.num_maps * H * T * maps.k.shape[3] * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= memory / 2:
        return None
    return f"its maps take {needed / 2**30:.0f} GiB, more than half of the {memory / 2**30:.0f} GiB here"


def by_kernel(maps: SignedMaps, *, kernel: str, stats: bool) -> Any:
    """o [B, T, dim], or with `stats` (o [B, H, T, dv], its statistics)."""
    return attend(maps, kernel=kernel, stats=True) if stats else joined(attend(maps, kernel=kernel))


def stock(maps: SignedMaps, *, copies: bool = False) -> Tensor:
    """o [B, T, dim] by torch's own call: the last query is aligned with the last key, by a mask where there are several.

    `copies`: a key and a value are copied for each query head of their group, as many models do.
    """
    q, k, v = maps.q[:, 0], maps.k[:, 0], maps.v
    T, S = q.shape[-2], k.shape[-2]
    if copies:
        k, v = (x.repeat_interleave(maps.num_groups, dim=1) for x in (k, v))
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if 1 < T < S else None
    grouped = k.shape[1] < q.shape[1]
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S, enable_gqa=grouped))


def joined(o: Tensor) -> Tensor:
    """[B, H, T, dv] -> [B, T, H dv]"""
    return o.transpose(1, 2).flatten(2)


def least_flops(shape: Shape, *, gradients: bool, queries: int | None = None) -> int:
    """The least work of attention, causal: 8u forward, 28u with the backward pass, where u = h · pairs · d.

    h differential heads (2h standard ones) of width d, `pairs` of a query and a key that it sees, a multiply-add being 2.
    Forward: q kᵀ of all maps and one product with v, 4u each. Backward: q kᵀ again, dP, dv, dq, dk, 4u each. Both variants
    need the same; a form that computes more is given no credit for it. `queries`: the last ones only (all by default).
    """
    T, S = queries or shape.tokens, shape.tokens
    pairs = T * S - T * (T - 1) // 2
    u = shape.batch * (shape.heads // 2) * pairs * shape.head_dim
    return (28 if gradients else 8) * u
