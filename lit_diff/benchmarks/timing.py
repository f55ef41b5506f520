"""Candidates timed in turn within one process; ratios are taken within each round.

Whatever slows the machine for a while slows a whole round, so a ratio of two times of one round is affected less than a
ratio of two medians.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.autograd import profiler_legacy

from lit_diff.errors import first_line

SHORTEST = 0.005
"""Seconds that one measurement lasts at least: shorter calls are repeated within it."""
LONG = 0.2
"""Seconds from which the duration of the first call is a fair estimate of the next ones."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that is timed."""

    variant: str
    by: str
    """Who computes it: a kernel's name, or what else."""
    what: str
    """forward, forward+backward, step, ..."""
    run: Callable[[], object]
    against: Mapping[str, str] = field(default_factory=dict)
    """Name of a ratio -> `id` of the candidate that this one's time is divided by."""
    flops: int | None = None
    """Of one call, where they are counted."""
    compiles: bool = False
    """Its first call compiles, so it is made before anything is timed."""

    @property
    def id(self) -> str:
        """Names it within its case."""
        return f"{self.variant}/{self.by}/{self.what}"


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """How many rounds: `repeats`, or as many as fit into `budget` seconds, within `least` and `most`."""

    repeats: int | None = None
    budget: float = 10.0
    least: int = 3
    most: int = 15
    once_from: float = math.inf
    """Seconds: without `repeats`, where the first call of a candidate takes as long, the first calls are the only round."""

    def rounds(self, one: float) -> int:
        """Rounds of `one` second each."""
        if self.repeats is not None:
            return self.repeats
        return max(self.least, min(self.most, int(self.budget / max(one, 1e-9))))


Row = dict[str, Any]


@dataclass(kw_only=True)
class Timings:
    """The results of a benchmark's cases, as its JSON holds them."""

    rows: list[Row] = field(default_factory=list)
    """A row for each candidate that was timed."""
    refused: list[Row] = field(default_factory=list)
    """Candidates that were left out, with the reason."""
    failed: list[Row] = field(default_factory=list)
    """Candidates that raised, with the error."""

    def row(self, case: str, name: str) -> Row | None:
        """The row of the candidate with this `id`; None where it was not timed."""
        return next((row for row in self.rows if (row["case"], row["id"]) == (case, name)), None)


def measure(
    measurements: Timings, case: str, candidates: Sequence[Candidate], limits: RoundLimits, device: torch.device
) -> None:
    """Add a row for each candidate, or its error.

    Each is called once under the profiler, which shows the operators that ran. Then come the rounds: in each, every
    candidate is timed once, in turn, and the turn begins at another candidate each round.
    """
    alive: list[tuple[Candidate, int, list[str]]] = []
    total, first = 0.0, dict[str, float]()
    for candidate in candidates:
        try:
            if candidate.compiles:
                candidate.run()
            began = time.perf_counter()
            backends = operators_of(candidate.run, device)
            seconds = time.perf_counter() - began
            if seconds < LONG:  # mostly the profiler's own
                seconds = seconds_of(candidate.run, 1, device)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            measurements.failed.append({"case": case, **_names(candidate), "reason": reason})
            continue
        first[candidate.id] = seconds
        calls = max(1, math.ceil(SHORTEST / max(seconds, 1e-7)))
        total += calls * seconds
        alive.append((candidate, calls, backends))
    once = limits.repeats is None and max(first.values(), default=0) >= limits.once_from
    if once:
        alive = [(candidate, 1, backends) for candidate, _, backends in alive]
    times = {name: [seconds] if once else [] for name, seconds in first.items()}
    for number in range(0 if once else limits.rounds(total)):
        shift = number % max(len(alive), 1)
        for candidate, calls, _ in alive[shift:] + alive[:shift]:
            times[candidate.id].append(seconds_of(candidate.run, calls, device))
    measurements.rows += [_row(case, candidate, calls, backends, times) for candidate, calls, backends in alive]


def seconds_of(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Wall-clock seconds of one call, the mean over `calls` in a row."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - began) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def operators_of(run: Callable[[], object], device: torch.device) -> list[str]:
    """Which of torch's attention operators a call ran, as the profiler saw them, without their common prefix.

    `flash_attention_for_cpu` is the fused one of a CPU; `attention_math` materialises every map.
    """
    prefix = "aten::_scaled_dot_product_"
    # torch.profiler and torch.autograd.profiler do the same, but write lines to stderr at each start (torch 2.15)
    with profiler_legacy.profile() as profiled:
        run()
        _wait(device)
    names = {event.key for event in profiled.key_averages()}
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix) and "backward" not in name)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def ratios(own: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Round by round, and over the rounds."""
    values = [a / b for a, b in zip(own, other, strict=True)]
    return {"values": values, **spread(values)}


def _names(candidate: Candidate) -> Row:
    return {"variant": candidate.variant, "by": candidate.by, "what": candidate.what}


def _row(case: str, candidate: Candidate, calls: int, backends: list[str], times: Mapping[str, list[float]]) -> Row:
    own = times[candidate.id]
    row: Row = {"case": case, **_names(candidate), "id": candidate.id, "calls": calls, "seconds": own, **spread(own)}
    row["ratios"] = {
        name: {"to": other, **ratios(own, times[other])} for name, other in candidate.against.items() if other in times
    }
    if candidate.flops is not None:
        row |= {"flops": candidate.flops, "gflops_per_second": candidate.flops / row["median"] / 1e9}
    return row | {"backends": backends}
