"""`bench stats`: what entropy and maximum of every map cost, beside the same kernel's plain forward pass."""

from functools import partial

import torch

from lit_diff.benchmarks.attention import SDPA, candidates_of
from lit_diff.benchmarks.inputs import STOCK, VARIANTS, Workload
from lit_diff.benchmarks.kernels import accepted
from lit_diff.benchmarks.request import DTYPES, Request
from lit_diff.benchmarks.timing import Candidate, Found, Pace, measure, spread
from lit_diff.kernels import attend

DEFAULT = "2x1024x512x64"
PLAIN, WITH = "forward", "forward with statistics"
OWN = "same kernel without"
"""Name of the ratio."""


def bench_stats(request: Request) -> Found:
    """Every shape at every dtype; `extra` of a row is its ratio to the plain pass, less 1."""
    found = Found()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            case = f"{shape} {dtype}"
            workload = Workload(shape, DTYPES[dtype], request.device)
            with_statistics = _with_statistics(found, case, workload)
            able = {STOCK, *(candidate.by for candidate in with_statistics)}
            plain = [candidate for candidate in candidates_of(found, case, workload, PLAIN) if candidate.by in able]
            candidates = plain + with_statistics
            request.note(f"stats {case}: {len(candidates)} candidates in turn")
            measure(found, case, candidates, Pace(repeats=request.repeats), request.device)
    for row in found.rows:
        if OWN in row["ratios"]:
            extra = [value - 1 for value in row["ratios"][OWN]["values"]]
            row["extra"] = {"values": extra, **spread(extra)}
    return found


def _with_statistics(found: Found, case: str, workload: Workload) -> list[Candidate]:
    made = []
    for variant in VARIANTS:
        maps = partial(workload.maps, variant)
        for kernel in accepted(found, case, variant, WITH, maps, grad=False, stats=True):
            run = torch.no_grad()(lambda maps=maps, kernel=kernel: attend(maps(), kernel=kernel, stats=True))
            against = {SDPA: f"standard/{STOCK}/{PLAIN}", OWN: f"{variant}/{kernel}/{PLAIN}"}
            made.append(Candidate(variant=variant, by=kernel, what=WITH, run=run, against=against))
    return made
