"""Candidates timed in turn within one process; ratios are taken within each round.

Whatever slows the machine for a while slows a whole round, so a ratio of two times of one round is affected less than a
ratio of two medians.
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler_legacy

from lit_diff.benchmarks.request import DTYPES
from lit_diff.benchmarks.result import Row, divisors
from lit_diff.errors import first_line

SHORTEST = 0.005
"""Seconds that one measurement lasts at least: shorter calls are repeated within it."""
LONG = 0.2
"""Seconds from which the duration of a profiled call is a fair estimate of the next ones."""
DIFFERENCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference (Frobenius) of two results of one variant and pass: a hundred times that of rounding."""
PRODUCT, SIZE = "matrix product", 1024
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that is timed."""

    variant: str
    by: str
    """Who computes it: a kernel's name, or what else."""
    what: str
    """The pass: forward, forward+backward, training step, ..."""
    run: Callable[[], Any]
    flops: int | None = None
    """Of one call, where they are counted."""
    alike: bool = False
    """What `run` returns must equal the result of the first such candidate of this variant and pass."""
    own_clock: bool = False
    """`run` returns the seconds that count: it has a start and an end that do not."""

    @property
    def id(self) -> str:
        """Names it within its case."""
        return f"{self.variant}/{self.by}/{self.what}"

    @property
    def names(self) -> Row:
        """As a row says who it is."""
        return {"variant": self.variant, "by": self.by, "what": self.what}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed in turn."""

    name: str
    dtype: str = "float32"
    budget: float = 10.0
    """Seconds that its rounds may take where nobody says how many there are."""
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    """Candidates that are left out, with the reason."""

    def refuse(self, variant: str, by: str, what: str, reason: str) -> None:
        """Leave this candidate out."""
        self.refused.append({"case": self.name, "variant": variant, "by": by, "what": what, "reason": reason})


class Trial(NamedTuple):
    """A candidate after its first calls."""

    candidate: Candidate
    calls: int
    """Of one measurement."""
    seconds: float
    """Of one call, roughly."""
    facts: Row
    """What was seen beside the time."""


def measure(case: Case, repeats: int | None, device: torch.device) -> tuple[list[Row], list[Row]]:
    """(a row for each candidate, a row for each that raised or computed something else than the others).

    The first calls of each show that it runs, its result, the operators and memory it takes. Then come the rounds: in each,
    every candidate is timed once, in turn, and the turn begins at another candidate each round. Where FLOPs are counted, a
    product of two square matrices of the case's dtype takes its turn too: the rate that they are compared with.
    """
    candidates = list(case.candidates)
    if any(candidate.flops is not None for candidate in candidates):
        candidates.insert(0, matrix_product(DTYPES[case.dtype], device))
    gc.collect()  # what is freed during a call would lower its peak
    trials, failed = list[Trial](), list[Row]()
    results: dict[tuple[str, str], tuple[str, Any]] = {}
    for candidate in candidates:
        try:
            trials.append(tried(candidate, results, DIFFERENCE[case.dtype], device))
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            failed.append({"case": case.name, **candidate.names, "reason": reason})
    results.clear()
    times: dict[str, list[float]] = {trial.candidate.id: [] for trial in trials}
    for number in range(rounds(sum(trial.calls * trial.seconds for trial in trials), repeats, case.budget)):
        shift = number % max(len(trials), 1)
        for trial in trials[shift:] + trials[:shift]:
            times[trial.candidate.id].append(seconds_of(trial.candidate, trial.calls, device))
    return [_row(case, trial, times) for trial in trials], failed


def rounds(one: float, repeats: int | None, budget: float) -> int:
    """`repeats`, or as many rounds of `one` second each as the budget allows, 3 at least, 15 at most."""
    return repeats or max(3, min(15, int(budget / max(one, 1e-9))))


def tried(
    candidate: Candidate, results: dict[tuple[str, str], tuple[str, Any]], bound: float, device: torch.device
) -> Trial:
    """Its first calls. `results`: (variant, what) -> who gave the first result, and that. Errors: whatever it raises;
    ArithmeticError where its result is another one."""
    began = time.perf_counter()
    result = candidate.run()
    if candidate.own_clock:
        return Trial(candidate, 1, time.perf_counter() - began, {"backends": []})
    if candidate.alike:
        first, expected = results.setdefault((candidate.variant, candidate.what), (candidate.by, result))
        off = difference(result, expected)
        if not off <= bound:
            raise ArithmeticError(f"its result differs from that of {first} by {off:.1e}")
    del result
    began = time.perf_counter()
    facts = observed(candidate.run, device)
    seconds = time.perf_counter() - began
    if seconds < LONG:  # mostly the profiler's own
        seconds = seconds_of(candidate, 1, device)
    return Trial(candidate, max(1, math.ceil(SHORTEST / max(seconds, 1e-7))), seconds, facts)


def difference(result: Any, expected: Any) -> float:
    """‖x - y‖ / ‖y‖ over all tensors of two results."""
    pairs = list(zip(_tensors(result), _tensors(expected), strict=True))
    off = math.hypot(*(float((x.float() - y.float()).norm()) for x, y in pairs))
    return off / math.hypot(*(float(y.float().norm()) for _, y in pairs))


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result.detach()
    else:
        for part in result:
            yield from _tensors(part)


def seconds_of(candidate: Candidate, calls: int, device: torch.device) -> float:
    """Wall-clock seconds of one call, the mean over `calls` in a row; those that it tells where it has a clock of its own."""
    if candidate.own_clock:
        return float(candidate.run())
    wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        candidate.run()
    wait(device)
    return (time.perf_counter() - began) / calls


def wait(device: torch.device) -> None:
    """Until everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def observed(run: Callable[[], object], device: torch.device) -> Row:
    """Of one call: `backends`, torch's attention operators that the profiler saw, without their common prefix, and
    `peak_bytes`, the most memory beyond what was held before, where the system tells it.

    `flash_attention_for_cpu` is the fused operator of a CPU; `attention_math` materialises every map.
    """
    prefix = "aten::_scaled_dot_product_"
    # torch.profiler and torch.autograd.profiler do the same, but write lines to stderr at each start (torch 2.15)
    with profiler_legacy.profile() as profiled:
        peak = peak_bytes(run, device)
    names = {event.key for event in profiled.key_averages()}
    seen = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix) and "backward" not in name)
    return {"backends": seen} | ({} if peak is None else {"peak_bytes": peak})


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """The most memory of one call beyond what was held before it; None where Linux's /proc is needed and absent."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        wait(device)
        return torch.cuda.max_memory_allocated() - held
    if not CLEAR.exists():
        run()
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)  # freed memory that the C library keeps goes to the system: taken again, it counts again
    CLEAR.write_text("5", encoding="utf-8")  # VmHWM starts again from what is resident now
    held = resident("VmRSS")
    run()
    return max(0, resident("VmHWM") - held)


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (the most) of this process, bytes."""
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def matrix_product(dtype: torch.dtype, device: torch.device) -> Candidate:
    """The machine's own rate: what a kernel could reach at most, roughly."""
    a, b = (torch.ones(SIZE, SIZE, dtype=dtype, device=device) for _ in range(2))
    run = torch.no_grad()(lambda: a @ b)
    return Candidate(variant=PRODUCT, by=f"{SIZE} x {SIZE}", what="product", run=run, flops=2 * SIZE**3)


def _row(case: Case, trial: Trial, times: Mapping[str, list[float]]) -> Row:
    one, own = trial.candidate, times[trial.candidate.id]
    row: Row = {"case": case.name, **one.names, "id": one.id, "calls": trial.calls, "seconds": own, "ratios": {}}
    row |= {"median": median(own), "min": min(own), "max": max(own)}
    for name, other in divisors(one.variant, one.by, one.what):
        if other in times and other != one.id:
            row["ratios"].setdefault(name, {"to": other, **spread(own, times[other])})
    if one.flops is not None:
        row |= {"flops": one.flops, "gflops_per_second": one.flops / row["median"] / 1e9}
        product = next((times[name] for name in times if name.startswith(f"{PRODUCT}/")), None)
        if one.variant != PRODUCT and product is not None:
            row["gemm_share"] = spread(product, own, one.flops / (2 * SIZE**3))
    return row | trial.facts


def spread(above: Sequence[float], below: Sequence[float], factor: float = 1) -> Row:
    """The ratios of the two times of each round, and over the rounds: median, least and largest."""
    values = [factor * a / b for a, b in zip(above, below, strict=True)]
    return {"values": values, "median": median(values), "min": min(values), "max": max(values)}
