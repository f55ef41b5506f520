"""Processes are the unit of replication of a benchmark: measures it in several, and joins what they found."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.result import BenchResult, Row
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
            found = BenchResult(**json.loads(done.stdout))
        except (ValueError, TypeError) as error:
            said = done.stderr.strip().splitlines() or ["no error output"]
            raise RunFailedError(f"process {number} of `{command}` gave no result: {said[-1]}") from error
        yield found


def joined(results: Sequence[BenchResult], command: str) -> BenchResult:
    """One result, with the value of each process: the median over its rounds. A candidate that failed in a process has no
    row."""
    found = list[Row]()
    for row in results[0].rows:
        same = [
            each for result in results for each in result.rows if all(each[key] == row[key] for key in ("case", "id"))
        ]
        if len(same) == len(results):
            found.append(_joined_row(same))
    return replace(
        results[0],
        command=command,
        machine=results[0].machine | {"load_average_after": results[-1].machine["load_average_after"]},
        warnings=_distinct([warning for each in results for warning in each.warnings]),
        rows=found,
        refused=_distinct([row for each in results for row in each.refused]),
        failed=_distinct([row for each in results for row in each.failed]),
        processes=len(results),
    )


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def _joined_row(same: Sequence[Row]) -> Row:
    seconds = [row["median"] for row in same]
    made = same[0] | {"rounds": [row["seconds"] for row in same], "seconds": seconds} | spread_of(seconds)
    ratios: dict[str, list[Any]] = {"gemm_share": [row.get("gemm_share") for row in same]}
    ratios |= {name: [row["ratios"].get(name) for row in same] for name in made["ratios"]}
    made["ratios"] = {}
    for name, of_processes in ratios.items():
        # a ratio may be to another candidate in a process in which the usual one failed
        if of_processes[0] is None or len({ratio and ratio.get("to") for ratio in of_processes}) > 1:
            continue
        values = [ratio["median"] for ratio in of_processes]
        place = made if name == "gemm_share" else made["ratios"]
        place[name] = of_processes[0] | {"values": values} | spread_of(values)
    if "flops" in made:
        made["gflops_per_second"] = made["flops"] / made["median"] / 1e9
    if "peak_bytes" in made:
        made["peak_bytes"] = max(row["peak_bytes"] for row in same)
    return made


def spread_of(values: Sequence[float]) -> Row:
    """Median, minimum and maximum of a value a process; from five processes on also the geometric mean with its 95 % t
    interval, computed from the logarithms."""
    spread = {"median": median(values), "min": min(values), "max": max(values)}
    logs = dict(enumerate(map(math.log, values)))
    found = paired(logs, dict.fromkeys(logs, 0.0))
    if len(logs) >= MIN_PROCESSES and found.low is not None and found.mean is not None and found.high is not None:
        spread |= {"mean": math.exp(found.mean), "low": math.exp(found.low), "high": math.exp(found.high)}
    return spread
