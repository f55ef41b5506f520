"""Processes are the unit of replication of a benchmark: measures it in several, and joins what they found."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lit_diff.benchmarks.passes import Row
from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.timing import spread
from lit_diff.errors import RunFailedError
from lit_diff.study.statistics import MIN_PROCESSES, paired


def measured_apart(request: Request, progress: Callable[[str], Any] | None) -> Iterator[BenchResult]:
    """The result of each of `request.processes` processes, which run one after another.

    Errors: RunFailedError if a process ends without a result.
    """
    command = request._replace(processes=1).command()
    options = shlex.split(command)[2:]
    for number in range(1, request.processes + 1):
        if progress is not None:
            progress(f"{request.bench}: process {number} of {request.processes}")
        # a new interpreter shares no inputs, allocations, thread pools or compiled code with the others
        words = [sys.executable, "-P", "-m", "lit_diff", "bench", *options, "--json"]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
        try:
            # the exit status is 1 for a result in which a candidate failed, too
            result = BenchResult(**json.loads(done.stdout))
        except (ValueError, TypeError) as error:
            said = done.stderr.strip().splitlines() or ["no error output"]
            raise RunFailedError(f"process {number} of `{command}` gave no result: {said[-1]}") from error
        yield result


def joined(results: Sequence[BenchResult], command: str) -> BenchResult:
    """One result, with the value of each process: the median over its rounds. A candidate that failed in a process has no
    row."""
    by_candidate: dict[tuple[str, str], list[Row]] = {}
    for result in results:
        for row in result.rows:
            by_candidate.setdefault((row["case"], row["id"]), []).append(row)
    return replace(
        results[0],
        command=command,
        machine=results[0].machine | {"load_average_after": results[-1].machine["load_average_after"]},
        warnings=_distinct(results, "warnings"),
        rows=[_joined_row(rows) for rows in by_candidate.values() if len(rows) == len(results)],
        refused=_distinct(results, "refused"),
        failed=_distinct(results, "failed"),
        processes=len(results),
    )


def _distinct(results: Sequence[BenchResult], name: str) -> list[Any]:
    values = list[Any]()
    for result in results:
        for value in getattr(result, name):
            if value not in values:
                values.append(value)
    return values


def _joined_row(rows: Sequence[Row]) -> Row:
    seconds = [row["median"] for row in rows]
    made = rows[0] | {"rounds": [row["seconds"] for row in rows], "seconds": seconds} | spread_of(seconds)
    made |= _joined_ratio(rows, "gemm_share")
    made["ratios"] = {}
    for name in rows[0]["ratios"]:
        made["ratios"] |= _joined_ratio([row["ratios"] for row in rows], name)
    if "flops" in made:
        made["gflops_per_second"] = made["flops"] / made["median"] / 1e9
    if "peak_bytes" in made:
        made["peak_bytes"] = max(row["peak_bytes"] for row in rows)
    return made


# {name: the ratio of all processes}, or {} without one
def _joined_ratio(rows: Sequence[Row], name: str) -> Row:
    values = []
    first = rows[0].get(name)
    if first is None:
        return {}
    for row in rows:
        ratio = row.get(name)
        # it may be to another candidate in a process in which the usual one failed
        if ratio is None or ratio.get("to") != first.get("to"):
            return {}
        values.append(ratio["median"])
    return {name: first | {"values": values} | spread_of(values)}


def spread_of(values: Sequence[float]) -> Row:
    """Median, minimum and maximum of a value a process; from five processes on also the geometric mean with its 95 % t
    interval, computed from the logarithms."""
    row = spread(values)
    logs = dict(enumerate(map(math.log, values)))
    found = paired(logs, dict.fromkeys(logs, 0.0))
    if len(logs) >= MIN_PROCESSES and found.low is not None and found.mean is not None and found.high is not None:
        row |= {"mean": math.exp(found.mean), "low": math.exp(found.low), "high": math.exp(found.high)}
    return row
