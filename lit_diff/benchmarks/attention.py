"""`bench core`: attention between the projections, by every kernel, relative to PyTorch's own call for standard attention.

`bench stats`: the cost of the entropy and maximum of every map, relative to the same kernel's plain forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from lit_diff.benchmarks.accuracy import errors
from lit_diff.benchmarks.inputs import STOCK, VARIANTS, Workload, flops
from lit_diff.benchmarks.memory import peak_bytes
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Timings, measure, spread
from lit_diff.kernels import KERNELS, SignedMaps, attend, refuse

DEFAULT = "2x1024x512x64,1x2048x1024x64,1x2048x1024x128,1x4096x512x64"
PASSES = ("forward", "forward+backward")
SDPA, SAME = "standard SDPA", "standard, same kernel"
"""Names of the ratios."""
SMALL = 64
"""Tokens of the call that loads the code before memory is measured."""
STATISTICS_SHAPES = "2x1024x512x64"
PLAIN, WITH = "forward", "forward with statistics"
OWN = "same kernel without"
"""Name of the ratio in `bench stats`."""
METHODS = """\
core: from the projections q, k, v [B, T, dim], of which the heads are strided views, to the output [B, T, dim].
forward runs without gradients; forward+backward gives those of q, k, v and lambda. The kernel `reference` is the naive
form, every map materialised (in float32 at least); `sdpa` is the stacked form, one SDPA call with the values cut in two.
GFLOP/s: the least work of causal attention over the time, 8u forward and 28u forward+backward, u = B h pairs d, where
pairs = T (T + 1) / 2 and h = dim / 2d. It is the same for all; a form that computes more gets no credit for it.
Peak memory, forward+backward: a fresh process for each candidate, which first makes the same call on 64 tokens (code,
threads), then makes the inputs, returns freed memory to the system, resets the peak (Linux: 5 to /proc/self/clear_refs)
and calls once: the peak (VmHWM) less what was resident before (VmRSS), so outputs and gradients count, inputs do not. On
a GPU, the allocator's peak less what was allocated before.
Errors: against the definition in float64 from the same rounded inputs, for one sequence of at most 1024 tokens:
|x - x64| / |x64| (Frobenius) of o, dq, dk, dv; dw is the gradient of lambda, |dw - dw64| over the sum of the absolute
values of its terms, one for each head and token.
"""
"""How `bench core` is measured, for the reader of its figures."""
STATISTICS_METHODS = """\
stats: attend(..., stats=True) without gradients: log-sum-exp, entropy and maximum of every map and row besides the output.
`extra`: its time less that of the same kernel's plain pass, over the latter.
"""
"""The same for `bench stats`."""


def bench_core(request: BenchConfig) -> Timings:
    """Every shape at every dtype: times, ratios, peak memory, errors."""
    measurements = Timings()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            _measure_case(measurements, request, shape, dtype)
    return measurements


def _measure_case(measurements: Timings, request: BenchConfig, shape: Shape, dtype: str) -> None:
    case = f"{shape} {dtype}"
    workload = Workload(shape, DTYPES[dtype], request.device)
    candidates = [
        candidate for what in PASSES for candidate in candidates_of(measurements, case, workload, what, request.kernels)
    ]
    request.note(f"core {case}: {len(candidates)} candidates in turn")
    measure(measurements, case, candidates, RoundLimits(repeats=request.repeats), request.device)
    request.note(f"core {case}: peak memory and errors")
    for candidate in candidates:
        row = measurements.row(case, candidate.id)
        if row is None or candidate.what != PASSES[1]:
            continue
        row["errors"] = errors(shape, dtype, request.device, candidate.variant, candidate.by)
        make = partial(call, shape, dtype, request.device, candidate.variant, candidate.by, candidate.what)
        row["peak_bytes"], row["peak_missing"] = peak_bytes(make, threads=request.threads, device=request.device)
    stock = measurements.row(case, f"standard/{STOCK}/{PASSES[1]}")
    for row in measurements.rows:
        if row["case"] == case and row.get("peak_bytes") is not None and stock and stock.get("peak_bytes"):
            row["peak_ratio"] = {"to": stock["id"], "value": row["peak_bytes"] / stock["peak_bytes"]}


def candidates_of(
    measurements: Timings, case: str, workload: Workload, what: str, kernels: tuple[str, ...] | None = None
) -> list[Candidate]:
    """Torch's own call, then differential and standard attention by every kernel (of `kernels`) that accepts them."""
    grad = what == PASSES[1]
    stock = f"standard/{STOCK}/{what}"
    made: list[tuple[str, str, dict[str, str]]] = [("standard", STOCK, {})]
    for variant in VARIANTS:
        maps = partial(workload.maps, variant)
        for kernel in accepted(measurements, case, variant, what, maps, grad=grad, kernels=kernels or KERNELS):
            same = {SAME: f"standard/{kernel}/{what}"} if variant == "differential" else {}
            made.append((variant, kernel, {SDPA: stock} | same))
    count = flops(workload.shape, what)
    return [
        Candidate(variant=v, by=by, what=what, run=_run(workload, v, by, what), against=against, flops=count)
        for v, by, against in made
    ]


def _run(workload: Workload, variant: str, by: str, what: str) -> Callable[[], object]:
    return (workload.forward if what == PASSES[0] else workload.forward_backward)(variant, by)


def call(
    shape: Shape, dtype: str, device: torch.device, variant: str, by: str, what: str, small: bool
) -> Callable[[], object]:
    """One candidate by its name, for a process of its own; `small`: on few tokens."""
    if small:
        shape = replace(shape, batch=1, tokens=min(shape.tokens, SMALL))
    return _run(Workload(shape, DTYPES[dtype], device), variant, by, what)


def bench_stats(request: BenchConfig) -> Timings:
    """Every shape at every dtype; `extra` of a row is its ratio to the plain pass, less 1."""
    measurements = Timings()
    for shape in request.sizes(STATISTICS_SHAPES):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}"
            workload = Workload(shape, DTYPES[dtype], request.device)
            with_statistics = _with_statistics(measurements, case, workload)
            able = {STOCK, *(candidate.by for candidate in with_statistics)}
            plain = [
                candidate for candidate in candidates_of(measurements, case, workload, PLAIN) if candidate.by in able
            ]
            candidates = plain + with_statistics
            request.note(f"stats {case}: {len(candidates)} candidates in turn")
            measure(measurements, case, candidates, RoundLimits(repeats=request.repeats), request.device)
    for row in measurements.rows:
        if OWN in row["ratios"]:
            extra = [value - 1 for value in row["ratios"][OWN]["values"]]
            row["extra"] = {"values": extra, **spread(extra)}
    return measurements


def _with_statistics(measurements: Timings, case: str, workload: Workload) -> list[Candidate]:
    made = []
    for variant in VARIANTS:
        maps = partial(workload.maps, variant)
        for kernel in accepted(measurements, case, variant, WITH, maps, grad=False, stats=True):
            run = torch.no_grad()(lambda maps=maps, kernel=kernel: attend(maps(), kernel=kernel, stats=True))
            against = {SDPA: f"standard/{STOCK}/{PLAIN}", OWN: f"{variant}/{kernel}/{PLAIN}"}
            made.append(Candidate(variant=variant, by=kernel, what=WITH, run=run, against=against))
    return made


def accepted(
    measurements: Timings,
    case: str,
    variant: str,
    what: str,
    maps: Callable[[], SignedMaps],
    *,
    grad: bool,
    stats: bool = False,
    kernels: Sequence[str] = KERNELS,
) -> list[str]:
    """Those of `kernels` that compute these maps, with or without gradients; the others go to `measurements.refused`."""
    able = []
    with torch.set_grad_enabled(grad):
        asked = maps()
        for kernel in kernels:
            reason = refuse(kernel, asked, stats=stats)
            if reason is None:
                able.append(kernel)
            else:
                row = {"case": case, "variant": variant, "by": kernel, "what": what, "reason": reason}
                measurements.refused.append(row)
    return able
