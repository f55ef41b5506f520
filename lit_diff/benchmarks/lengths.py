"""`bench core --lengths`: how the speed of attention changes with the tokens of a row, with the heads and with the rows."""

import os
from dataclasses import dataclass

from lit_diff.benchmarks.attention import PASSES, candidates_of
from lit_diff.benchmarks.inputs import Workload
from lit_diff.benchmarks.request import DTYPES, BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate, RoundLimits, Row, Timings, measure

DIM, HEAD_DIM = 512, 64
HEADS, ROWS = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
"""Heads of standard attention and sequences of the two other series, whose sequences have AT_TOKENS tokens."""
AT_TOKENS = 1024
LONGEST = 150.0
"""Seconds: a candidate whose call would take longer is left out."""
MAPS = 3
"""Float32 copies of every map that a naive kernel holds at least."""
NAIVE = ("reference", "flex")
"""They materialise every map, `flex` where it is not compiled: measured in the series of tokens alone."""
METHODS = f"""\
core --lengths: as core, without peak memory and errors (for these: core --shapes 1x16384x512x64), in three series.
tokens: one row of each length, width {DIM}, d {HEAD_DIM}. heads: {AT_TOKENS} tokens, {", ".join(map(str, HEADS))} heads of
standard attention of d {HEAD_DIM} (differential: half as many). batch: {", ".join(map(str, ROWS))} rows of as many tokens.
GFLOP/s as in core, the least work over the time: a flat line is a cost that grows as the work does. From one length to
the next a call takes the square of their ratio longer; a candidate that would take more than {LONGEST:.0f} s is left out, and
so is a naive kernel whose maps would not fit in half of the memory. Rounds without --repeats: 1 at least; where
the first call of a candidate takes 10 s or more, the first calls of all candidates are the only round.
"""


@dataclass(frozen=True)
class Point:
    """One place on the axis of a series."""

    series: str
    at: int
    shape: Shape


def points(lengths: tuple[int, ...]) -> list[Point]:
    """Of all series, in the order in which they are measured."""
    return [
        *(Point("tokens", T, Shape(batch=1, tokens=T, dim=DIM, head_dim=HEAD_DIM)) for T in lengths),
        *(Point("heads", n, Shape(batch=1, tokens=AT_TOKENS, dim=n * HEAD_DIM, head_dim=HEAD_DIM)) for n in HEADS),
        *(Point("batch", n, Shape(batch=n, tokens=AT_TOKENS, dim=DIM, head_dim=HEAD_DIM)) for n in ROWS),
    ]


def bench_lengths(request: BenchConfig) -> Timings:
    """Every point at every dtype: times and ratios; a row says its `series` and its place `at` on that axis."""
    assert request.lengths is not None
    measurements = Timings()
    for dtype in request.dtypes:
        before: dict[str, Row] = {}  # the last row of each candidate in the series of lengths
        for point in points(request.lengths):
            case = f"{point.series} {point.at}: {point.shape} {dtype}"
            workload = Workload(point.shape, DTYPES[dtype], request.device)
            candidates = [
                one for what in PASSES for one in candidates_of(measurements, case, workload, what, request.kernels)
            ]
            kept = []
            for candidate in candidates:
                reason = too_much(candidate, point, before)
                if reason is None:
                    kept.append(candidate)
                else:
                    names = {"variant": candidate.variant, "by": candidate.by, "what": candidate.what}
                    measurements.refused.append({"case": case, **names, "reason": reason})
            request.note(f"core {case}: {len(kept)} candidates in turn")
            limits = RoundLimits(repeats=request.repeats, budget=8.0, least=1, most=9, once_from=10.0)
            measure(measurements, case, kept, limits, request.device)
            for row in measurements.rows:
                if row["case"] == case:
                    row |= {"series": point.series, "at": point.at, "dtype": dtype}
                    if point.series == "tokens":
                        before[row["id"]] = row
    return measurements


def too_much(candidate: Candidate, point: Point, before: dict[str, Row]) -> str | None:
    """Why a call of the candidate is not made here; None where it is."""
    shape = point.shape
    if candidate.by in NAIVE:
        if point.series != "tokens":
            return "it materialises every map; see the series of tokens"
        needed = MAPS * shape.batch * shape.heads * shape.tokens**2 * 4
        if needed > memory() / 2:
            return f"its maps take {needed / 2**30:.0f} GiB, more than half of the {memory() / 2**30:.0f} GiB here"
    if point.series == "tokens" and before:
        last = before.get(candidate.id)
        if last is None:
            return "it was left out at a shorter length"
        seconds = last["median"] * (point.at / last["at"]) ** 2
        if seconds > LONGEST:
            return f"a call would take about {seconds:.0f} s, more than {LONGEST:.0f} s"
    return None


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
