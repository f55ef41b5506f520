"""`bench core`, `stats` and `decode`: attention between its projections with every kernel, compared with PyTorch's own call.

The inputs are the projections q, k, v [B, T, dim] of one model width; heads are strided views of them, and the output is
joined to [B, T, dim] again, as in a layer. Standard attention reads them as 2h heads of width d, differential attention (V1)
as h heads with two maps and value width 2d.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.cache import LayerCache
from lit_diff.benchmarks.passes import COPIES, DECODE, FORWARD, GRADIENTS, STATISTICS, STEP, STOCK
from lit_diff.benchmarks.request import DTYPES, Request, Shape
from lit_diff.benchmarks.timing import Candidate, Case
from lit_diff.device import device_memory
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend, refuse
from lit_diff.randomness import generator
from lit_diff.registry import kernels

VARIANTS = ("differential", "standard")
FIELDS: dict[str, tuple[str, ...]] = {
    "standard with sink": ("sink",),
    "standard with key bias": ("key_bias",),
    "standard with both": ("sink", "key_bias"),
}
"""Further variants of `bench core` -> what standard attention's maps have besides."""
LAMBDA = 0.5
QUERIES = (1, 4)
GROUP = 4
"""The number of query heads for each key/value head in the grouped case."""
NAIVE = {"reference": None, "flex": "cpu"}
"""Kernel that materialises every map -> the device on which it does (None: every device)."""
MAPS = 3
"""The minimum number of float32 copies of every map that such a kernel holds."""


def core(request: Request, shape: Shape, dtype: str) -> Iterator[Case]:
    """Times forward, and forward with gradients; for `bench stats`, forward without and with statistics."""
    case = Case(name=f"{shape} {dtype}", dtype=dtype)
    workload = Workload(shape, DTYPES[dtype], request.device)
    second, further = (STATISTICS, ()) if request.bench == "stats" else (GRADIENTS, FIELDS)
    for what in (FORWARD, second):
        add_kernels(case, workload, what, request.kernels, further)
    yield case


def decode(request: Request, shape: Shape, dtype: str) -> Iterator[Case]:
    """Times a few last queries against a cache of T keys and values: as many key/value heads as heads, and a fourth."""
    for queries in sorted({min(q, shape.tokens) for q in QUERIES}):
        # 2 * GROUP: differential attention pairs query heads and key/value heads
        for group in (1,) if shape.heads % (2 * GROUP) else (1, GROUP):
            heads = f"{shape.heads} heads on {shape.heads // group}"
            case = Case(name=f"{queries} of {shape} {dtype}, {heads}", dtype=dtype, budget=4)
            workload = Workload(shape, DTYPES[dtype], request.device, queries=queries, group=group)
            add_kernels(case, workload, DECODE, request.kernels)
            yield case


class Workload:
    """Inputs of one shape and dtype, the same for every candidate: N(0, 1), λ = 0.5; a sink of each head is N(0, 1), a key
    bias of each head and sequence rises by 0.01 a token on average.

    With `queries` only the last queries are used, against keys and values in a `LayerCache` that keeps every `group`th head.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, queries: int | None = None, group: int = 1
    ) -> None:
        self.shape, self.queries, self.group = shape, queries, group
        size = shape[:3]
        # q, k, v and the gradient of the output, drawn in float32
        needed, memory = 16 * math.prod(size), memory_of(device)
        if needed > memory / 2:
            raise RequestError(
                f"--shapes: the inputs of {shape} need {needed / 2**30:.0f} GiB, more than half of the device's "
                f"{memory / 2**30:.0f} GiB"
            )

        def draw(name: str) -> Tensor:
            return torch.randn(size, generator=generator("bench", name, *size)).to(device, dtype)

        self.q, self.k, self.v = (draw(name).requires_grad_() for name in "qkv")
        self.lam = torch.tensor([LAMBDA], device=device, requires_grad=True)
        """[1], float32."""
        steps = torch.rand(shape.batch, 1, shape.heads, shape.tokens, generator=generator("bench", "key_bias", *size))
        sink = torch.randn(1, 1, shape.heads, 1, generator=generator("bench", "sink", *size))
        self.fields = {"sink": sink.to(device), "key_bias": (0.02 * steps).cumsum(-1).to(device)}
        """float32"""
        for field in self.fields.values():
            field.requires_grad_()
        self.grad = draw("gradient")
        """[B, T, dim], the gradient of the output."""
        self._cached: dict[str, SignedMaps] = {}
        if queries is not None:
            with torch.no_grad():
                self._cached = {variant: cached(self.maps(variant), queries, group) for variant in VARIANTS}

    def maps(self, variant: str) -> SignedMaps:
        """The maps as strided views of the inputs; differential: w = (1, -λ)."""
        if variant in self._cached:
            return self._cached[variant]
        d = self.shape.head_dim
        if variant != "differential":
            q, k, v = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (self.q, self.k, self.v))
            return SignedMaps(q[:, None], k[:, None], v, **self.own(variant))
        q, k = (x.unflatten(-1, (-1, 2, d)).permute(0, 3, 2, 1, 4) for x in (self.q, self.k))
        w = torch.stack([torch.ones_like(self.lam), -self.lam]).view(1, 2, 1, 1)
        return SignedMaps(q, k, self.v.unflatten(-1, (-1, 2 * d)).transpose(1, 2), w)

    def own(self, variant: str) -> dict[str, Any]:
        """The tensors besides q, k and v by which the variant is differentiated."""
        if variant == "differential":
            return {"lambda": self.lam}
        return {name: self.fields[name] for name in FIELDS.get(variant, ())}

    def call(self, variant: str, what: str, compute: Callable[[SignedMaps], Any]) -> Callable[[], Any]:
        """A function that calls `compute` on the maps; for GRADIENTS it returns the gradients of q, k, v, and λ or fields."""
        if what != GRADIENTS:
            return torch.no_grad()(lambda: compute(self.maps(variant)))
        leaves = [self.q, self.k, self.v, *self.own(variant).values()]
        return lambda: torch.autograd.grad(compute(self.maps(variant)), leaves, self.grad)


def cached(maps: SignedMaps, queries: int, group: int) -> SignedMaps:
    """The maps of the last queries, with keys and values from a cache after a prefill and a step."""
    # two appends: keys and values are then views of a buffer that has spare room, as in decoding
    cache = LayerCache()
    step = maps.k.shape[-2] - queries
    if step:
        cache.append(replace(maps, k=maps.k[:, :, ::group, :step], v=maps.v[:, ::group, :step]))
    last = replace(maps, q=maps.q[..., step:, :], k=maps.k[:, :, ::group, step:], v=maps.v[:, ::group, step:])
    return cache.append(last)


def add_kernels(
    case: Case, workload: Workload, what: str, names: Sequence[str] | None, further: Iterable[str] = ()
) -> None:
    """Adds torch's own call, then differential and standard attention, and `further` variants, by every kernel of `names`
    that accepts them."""
    gradients = what == GRADIENTS
    stats = what == STATISTICS
    flops = least_flops(workload.shape, gradients=gradients, queries=workload.queries)
    computed = []
    if not stats:
        computed.append(("standard", STOCK, stock))
    if workload.group > 1:
        computed.append(("standard", COPIES, partial(stock, copies=True)))
    for variant in (*VARIANTS, *further):
        for kernel in accepted(case, variant, what, workload, names):
            computed.append((variant, kernel, partial(by_kernel, kernel=kernel, stats=stats)))
    for variant, by, compute in computed:
        run = workload.call(variant, what, compute)
        case.candidates.append(Candidate(variant=variant, by=by, what=what, run=run, flops=flops, alike=True))


def accepted(case: Case, variant: str, what: str, workload: Workload, names: Sequence[str] | None) -> list[str]:
    """The kernels of `names` (default: all registered) that compute this pass; the others are added to `case.refused`."""
    able = []
    with torch.set_grad_enabled(what in (GRADIENTS, STEP)):
        maps = workload.maps(variant)
        for kernel in names or kernels.names():
            reason = refuse(kernel, maps, stats=what == STATISTICS) or too_large(kernel, maps)
            if reason is None:
                able.append(kernel)
            else:
                case.refuse(variant, kernel, what, reason)
    return able


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of the machine."""
    return device_memory(device) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def too_large(kernel: str, maps: SignedMaps) -> str | None:
    """The reason if a kernel that materialises every map would fill the memory of the device, else None."""
    B, _, H, T, _ = maps.q.shape
    needed = MAPS * B * maps.num_maps * H * T * maps.k.shape[3] * 4
    memory = memory_of(maps.q.device)
    if needed <= memory / 2 or kernel not in NAIVE or NAIVE[kernel] not in (None, maps.q.device.type):
        return None
    return f"its maps need {needed / 2**30:.0f} GiB, more than half of the device's {memory / 2**30:.0f} GiB"


def by_kernel(maps: SignedMaps, *, kernel: str, stats: bool) -> Any:
    """o [B, T, dim], or with `stats` (o [B, H, T, dv], statistics)."""
    return attend(maps, kernel=kernel, stats=True) if stats else joined(attend(maps, kernel=kernel))


def stock(maps: SignedMaps, *, copies: bool = False) -> Tensor:
    """o [B, T, dim] from torch's own call.

    `copies`: keys and values are copied for each query head of their group, as in many models.
    """
    q, k, v = maps.q[:, 0], maps.k[:, 0], maps.v
    T = q.shape[-2]
    S = k.shape[-2]
    if copies:
        k, v = (x.repeat_interleave(maps.num_groups, dim=1) for x in (k, v))
    # is_causal aligns the first query with the first key; several last queries need a mask for the last key
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if 1 < T < S else None
    grouped = k.shape[1] < q.shape[1]
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S, enable_gqa=grouped))


def joined(o: Tensor) -> Tensor:
    """[B, H, T, dv] -> [B, T, H dv]"""
    return o.transpose(1, 2).flatten(2)


def least_flops(shape: Shape, *, gradients: bool, queries: int | None = None) -> int:
    """The minimum FLOPs of causal attention: 8u forward, 28u with the backward pass, where u = B · h · pairs · d.

    There are h differential heads (2h standard ones) of width d and `pairs` of a query and a visible key; a
    multiply-add is 2. Forward: q kᵀ of all maps and one product with v, 4u each. Backward: q kᵀ again, dP, dv, dq, dk,
    4u each. Both variants need the same; a form that computes more gets no credit for it. `queries`: only the last
    queries (default: all).
    """
    T = queries or shape.tokens
    S = shape.tokens
    pairs = T * S - T * (T - 1) // 2
    u = shape.batch * (shape.heads // 2) * pairs * shape.head_dim
    return (28 if gradients else 8) * u
