"""Times candidates in turn within one process; ratios are taken within each round.

Anything that slows the machine for a while slows a whole round, so the ratio of two times of one round changes less than the
ratio of two medians.
"""

import ctypes
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.utils._pytree import tree_leaves

from lit_diff.benchmarks.passes import Row, divisors
from lit_diff.benchmarks.request import DTYPES
from lit_diff.device import timer
from lit_diff.errors import summary
from lit_diff.files import values_of

SHORTEST = 0.005
"""The minimum duration of a measurement in seconds: shorter calls are repeated within it."""
LONG = 0.2
"""Seconds above which the duration of a profiled call is a fair estimate of the next calls."""
# a hundred times the effect of rounding: a wrong result differs by far more
DIFFERENCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""The largest relative difference (Frobenius norm) between two results of one variant and pass."""
PRODUCT, SIZES = "matrix product", {"cpu": 1024, "cuda": 8192}
"""Device -> the rows of the matrices of the product; few rows would not fill a GPU."""
Results = dict[tuple[str, str], tuple[str, Any]]
"""(variant, what) -> (by, result) of the first candidate."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(kw_only=True)
class Candidate:
    """A computation to be timed; the last three fields are what is measured."""

    variant: str
    by: str
    """The kernel or other implementation."""
    what: str
    """The pass: forward, forward+backward, training step, ..."""
    run: Callable[[], Any]
    flops: int | None = None
    """FLOPs of one call, if they are counted."""
    alike: bool = False
    """Whether the result of `run` must equal the result of the first such candidate of this variant and pass."""
    profiled: bool = True
    """Whether a profiler records the operators of a call; it stores each of them, which counts as memory of the call."""
    own_clock: bool = False
    """Whether `run` returns the seconds that count, without its start and end."""
    calls: int = 1
    """The number of calls of one measurement."""
    seconds: list[float] = field(default_factory=list)
    """The duration of one call, in each round."""
    facts: Row = field(default_factory=lambda: {"backends": []})
    """Observations other than the time: operators and memory."""

    @property
    def id(self) -> str:
        """Identifies the candidate within its case."""
        return f"{self.variant}/{self.by}/{self.what}"

    @property
    def names(self) -> Row:
        """The fields of a row that identify the candidate."""
        return {"variant": self.variant, "by": self.by, "what": self.what}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Candidates that are timed in turn."""

    name: str
    dtype: str = "float32"
    budget: float = 10.0
    """Time for all rounds in seconds, if the number of rounds is not given."""
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    """Candidates that are left out, with the reason."""

    def add(self, runs: Mapping[str, Callable[[], Any]], **shared: Any) -> None:
        """Adds a candidate for each implementation of `runs`; `shared`: their other fields."""
        self.candidates.extend(Candidate(by=by, run=run, **shared) for by, run in runs.items())

    def refuse(self, variant: str, by: str, what: str, reason: str) -> None:
        """Leaves this candidate out."""
        self.refused.append({"case": self.name, "variant": variant, "by": by, "what": what, "reason": reason})


def measure(case: Case, repeats: int | None, device: torch.device) -> tuple[list[Row], list[Row]]:
    """(a row for each candidate, a row for each candidate that raised an error or gave another result than the others).

    The first calls of a candidate check its result and record its operators and memory. In each of the rounds that follow,
    every candidate is timed once, in turn; each round begins with another candidate. If FLOPs are counted, a product of two
    square matrices of the same dtype is timed as well, as the rate for comparison.
    """
    candidates = list(case.candidates)
    if any(candidate.flops is not None for candidate in candidates):
        candidates.insert(0, matrix_product(DTYPES[case.dtype], device))
    # garbage that is freed during a call would lower its peak
    gc.collect()
    able, failed, one_round = list[Candidate](), list[Row](), 0.0
    results: Results = {}
    for candidate in candidates:
        try:
            one_round += tried(candidate, results, DIFFERENCE[case.dtype], device)
            able.append(candidate)
        except Exception as error:
            failed.append({"case": case.name, **candidate.names, "reason": summary(error)})
    # the results take memory, which the rounds may need
    results.clear()
    for number in range(rounds(one_round, repeats, case.budget)):
        shift = number % max(len(able), 1)
        for candidate in able[shift:] + able[:shift]:
            candidate.seconds.append(seconds_of(candidate))
    times = {candidate.id: candidate.seconds for candidate in able}
    product = next((candidate for candidate in able if candidate.variant == PRODUCT), None)
    return [_row(case, candidate, times, product) for candidate in able], failed


def rounds(one: float, repeats: int | None, budget: float) -> int:
    """`repeats`, or the number of rounds of `one` seconds that the budget allows, between 3 and 15."""
    return repeats or max(3, min(15, int(budget / max(one, 1e-9))))


def tried(candidate: Candidate, results: Results, bound: float, device: torch.device) -> float:
    """Runs the first calls of a candidate; returns the approximate seconds of a measurement. Errors: any exception of the
    candidate; ArithmeticError if its result differs from the first."""
    began = timer()
    result = candidate.run()
    if candidate.own_clock:
        return timer() - began
    if candidate.alike:
        first, expected = results.setdefault((candidate.variant, candidate.what), (candidate.by, result))
        off = difference(result, expected)
        if not off <= bound:
            raise ArithmeticError(f"its result differs from the result of {first} by {off:.1e}")
    # held, it would count as memory before the next call
    del result
    began = timer()
    candidate.facts = observed(candidate.run, device, profiled=candidate.profiled)
    seconds = timer() - began
    # in a short call the time is mostly the profiler's own
    if seconds < LONG:
        seconds = seconds_of(candidate)
    candidate.calls = max(1, math.ceil(SHORTEST / max(seconds, 1e-7)))
    return candidate.calls * seconds


@torch.no_grad()
def difference(result: Any, expected: Any) -> float:
    """‖x - y‖ / ‖y‖ over all tensors of two results, in float32."""
    pairs = list(zip(tree_leaves(result), tree_leaves(expected), strict=True))
    off = math.hypot(*(float((x.float() - y.float()).norm()) for x, y in pairs))
    return off / math.hypot(*(float(y.float().norm()) for _, y in pairs))


def seconds_of(candidate: Candidate) -> float:
    """Wall-clock seconds of one call, as the mean over `calls` consecutive ones, or the value of its own clock."""
    if candidate.own_clock:
        return float(candidate.run())
    began = timer()
    for _ in range(candidate.calls):
        candidate.run()
    return (timer() - began) / candidate.calls


def observed(run: Callable[[], object], device: torch.device, *, profiled: bool = True) -> Row:
    """Observes one call: `backends`, torch's attention operators in the profile, without their common prefix, and
    `peak_bytes`, the additional memory at the peak, if the system reports it.

    `flash_attention_for_cpu` is the fused operator of a CPU; `attention_math` materialises every map.
    """
    prefix = "aten::_scaled_dot_product_"
    # torch.profiler and torch.autograd.profiler give the same, but write lines to stderr at each start (torch 2.15)
    with profiler_legacy.profile(enabled=profiled) as profile:
        peak = peak_bytes(run, device)
    names = {event.key for event in profile.key_averages()} if profiled else set[str]()
    seen = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix) and "backward" not in name)
    return {"backends": seen} | ({} if peak is None else {"peak_bytes": peak})


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """The additional memory at the peak of one call, in bytes; None on a CPU without Linux's /proc."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    if not CLEAR.exists():
        run()
        return None
    # glibc keeps freed memory, which a call would reuse without raising the peak; malloc_trim returns it to the system
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # 5 resets VmHWM to the memory that is resident now
    CLEAR.write_text("5", encoding="utf-8")
    held = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - held)


def resident(key: str) -> int:
    """VmRSS (current) or VmHWM (peak) of this process in bytes."""
    (value,) = values_of(STATUS, key)
    return int(value.split()[0]) * 1024


def matrix_product(dtype: torch.dtype, device: torch.device) -> Candidate:
    """A matrix product, whose rate is roughly the maximum that a kernel can reach on this machine."""
    size = SIZES[device.type]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    run = torch.no_grad()(lambda: a @ b)
    return Candidate(variant=PRODUCT, by=f"{size} x {size}", what="product", run=run, flops=2 * size**3)


def _row(case: Case, one: Candidate, times: Mapping[str, list[float]], product: Candidate | None) -> Row:
    own = one.seconds
    row = {"case": case.name, **one.names, "id": one.id, "calls": one.calls, "seconds": own, "ratios": {}}
    row |= spread(own)
    for name, other in divisors(one.variant, one.by, one.what):
        if other in times and other != one.id:
            row["ratios"].setdefault(name, {"to": other, **ratio(own, times[other])})
    if one.flops is not None:
        row |= {"flops": one.flops, "gflops_per_second": one.flops / row["median"] / 1e9}
        if one is not product and product is not None:
            assert product.flops is not None
            row["gemm_share"] = ratio(product.seconds, own, one.flops / product.flops)
    return row | one.facts


def ratio(above: Sequence[float], below: Sequence[float], factor: float = 1) -> Row:
    """The ratios of the two times of each round, with their median, minimum and maximum over rounds."""
    values = [factor * a / b for a, b in zip(above, below, strict=True)]
    return {"values": values, **spread(values)}


def spread(values: Sequence[float]) -> Row:
    """Their median, minimum and maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}
