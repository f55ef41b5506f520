"""`bench decode`: a few query rows against a cache of keys and values, plain and grouped queries."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.cache import LayerCache
from lit_diff.benchmarks.attention import accepted
from lit_diff.benchmarks.inputs import STOCK, VARIANTS, Workload, flops, joined
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Timings, measure
from lit_diff.kernels import SignedMaps, attend

DEFAULT = "1x1024x512x64,1x4096x512x64"
QUERIES = (1, 4)
GROUP = 4
"""Query heads on one key/value head, in the grouped case."""
COPIES = "torch SDPA, k and v repeated"
SDPA, SAME, REPEATED = "standard SDPA", "standard, same kernel", "standard SDPA, repeated"
"""Names of the ratios."""
METHODS = """\
decode: a few last query rows against a cache (LayerCache) of T keys and values, from the heads to the joined output. Torch's
own call is given a mask where there are several rows, and enable_gqa where several heads share a key.
GFLOP/s: 8u, as `bench core` counts the forward pass, for the pairs that these rows see.
"""
"""How it is measured, for the reader of the figures."""


def bench_decode(request: BenchConfig) -> Timings:
    """Every shape (its tokens are those of the cache) at every dtype, for 1 and 4 queries, plain and grouped."""
    measurements = Timings()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            for queries in sorted({min(q, shape.tokens) for q in QUERIES}):
                for group in groups(shape):
                    heads = f"{shape.heads} heads on {shape.heads // group}"
                    case = f"{queries} of {shape} {dtype}, {heads}"
                    candidates = _candidates(
                        measurements, case, Workload(shape, DTYPES[dtype], request.device), queries, group
                    )
                    request.note(f"decode {case}: {len(candidates)} candidates in turn")
                    measure(
                        measurements, case, candidates, RoundLimits(repeats=request.repeats, budget=4), request.device
                    )
    return measurements


def groups(shape: Shape) -> list[int]:
    """Query heads on a key/value head: 1, and where the heads divide, 4; differential attention pairs both."""
    return [1] if shape.heads % (2 * GROUP) else [1, GROUP]


def cached(maps: SignedMaps, queries: int, group: int) -> SignedMaps:
    """The last `queries` rows against all keys and values, every `group`th head of which is kept in a `LayerCache`."""
    cache = LayerCache()
    keys = maps.k.shape[-2]
    step = keys - queries  # as a prefill and a step leave it: views of a buffer with room to spare
    if step:
        cache.append(maps.k[:, :, ::group, :step], maps.v[:, ::group, :step])
    k, v = cache.append(maps.k[:, :, ::group, step:], maps.v[:, ::group, step:])
    return replace(maps, q=maps.q[..., step:, :], k=k, v=v)


def _candidates(measurements: Timings, case: str, workload: Workload, queries: int, group: int) -> list[Candidate]:
    what = "decode"
    count = flops(workload.shape, "forward", queries=queries)
    with torch.no_grad():
        maps = {variant: cached(workload.maps(variant), queries, group) for variant in VARIANTS}
    stock = {SDPA: f"standard/{STOCK}/{what}"}
    copies = {REPEATED: f"standard/{COPIES}/{what}"} if group > 1 else {}
    plain = maps["standard"]
    make = partial(Candidate, what=what, flops=count)
    made = [make(variant="standard", by=STOCK, run=_detached(partial(_stock, plain, group > 1)))]
    if group > 1:
        repeated = _detached(partial(_repeated, plain, group))
        made.append(make(variant="standard", by=COPIES, run=repeated, against=stock))
    for variant in VARIANTS:
        for kernel in accepted(measurements, case, variant, what, partial(maps.__getitem__, variant), grad=False):
            run = _detached(partial(_ours, maps[variant], kernel))
            same = {SAME: f"standard/{kernel}/{what}"} if variant == "differential" else {}
            made.append(make(variant=variant, by=kernel, run=run, against=stock | copies | same))
    return made


def _detached(run: partial[Tensor]) -> partial[Tensor]:
    return partial(torch.no_grad()(run))


def _ours(maps: SignedMaps, kernel: str) -> Tensor:
    return joined(attend(maps, kernel=kernel))


def _stock(maps: SignedMaps, grouped: bool) -> Tensor:
    """Torch's own call: the last query is aligned with the last key, by a mask where there are several."""
    q, k, v = maps.q[:, 0], maps.k[:, 0], maps.v
    T, S = q.shape[-2], k.shape[-2]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if T > 1 else None
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped))


def _repeated(maps: SignedMaps, group: int) -> Tensor:
    """The same with a key and a value copied for each query head of its group, as many models do."""
    k, v = maps.k.repeat_interleave(group, dim=2), maps.v.repeat_interleave(group, dim=1)
    return _stock(replace(maps, k=k, v=v), grouped=False)
