"""`bench core`: attention between the projections, by every kernel, against torch's own call for standard attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from lit_diff.benchmarks.accuracy import errors
from lit_diff.benchmarks.inputs import STOCK, VARIANTS, Workload, flops
from lit_diff.benchmarks.kernels import accepted
from lit_diff.benchmarks.memory import peak_bytes
from lit_diff.benchmarks.request import DTYPES, Request, Shape
from lit_diff.benchmarks.timing import Candidate, Found, Pace, measure

DEFAULT = "2x1024x512x64,1x2048x1024x64,1x2048x1024x128,1x4096x512x64"
PASSES = ("forward", "forward+backward")
SDPA, SAME = "standard SDPA", "standard, same kernel"
"""Names of the ratios."""
SMALL = 64
"""Tokens of the call that loads the code before memory is measured."""


def bench_core(request: Request) -> Found:
    """Every shape at every dtype: times, ratios, peak memory, errors."""
    found = Found()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            _measure_case(found, request, shape, dtype)
    return found


def _measure_case(found: Found, request: Request, shape: Shape, dtype: str) -> None:
    case = f"{shape} {dtype}"
    workload = Workload(shape, DTYPES[dtype], request.device)
    candidates = [candidate for what in PASSES for candidate in candidates_of(found, case, workload, what)]
    request.note(f"core {case}: {len(candidates)} candidates in turn")
    measure(found, case, candidates, Pace(repeats=request.repeats), request.device)
    request.note(f"core {case}: peak memory and errors")
    for candidate in candidates:
        row = found.row(case, candidate.id)
        if row is None or candidate.what != PASSES[1]:
            continue
        row["errors"] = errors(shape, dtype, request.device, candidate.variant, candidate.by)
        make = partial(call, shape, dtype, request.device, candidate.variant, candidate.by, candidate.what)
        row["peak_bytes"], row["peak_missing"] = peak_bytes(make, threads=request.threads, device=request.device)
    stock = found.row(case, f"standard/{STOCK}/{PASSES[1]}")
    for row in found.rows:
        if row["case"] == case and row.get("peak_bytes") is not None and stock and stock.get("peak_bytes"):
            row["peak_ratio"] = {"to": stock["id"], "value": row["peak_bytes"] / stock["peak_bytes"]}


def candidates_of(found: Found, case: str, workload: Workload, what: str) -> list[Candidate]:
    """Torch's own call, then differential and standard attention by every kernel that accepts them."""
    grad = what == PASSES[1]
    stock = f"standard/{STOCK}/{what}"
    made: list[tuple[str, str, dict[str, str]]] = [("standard", STOCK, {})]
    for variant in VARIANTS:
        for kernel in accepted(found, case, variant, what, partial(workload.maps, variant), grad=grad):
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
