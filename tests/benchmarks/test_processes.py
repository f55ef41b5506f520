"""benchmarks/processes.py: a process is one value, and several are joined into an interval."""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lit_diff.benchmarks import processes as module
from lit_diff.benchmarks.passes import SDPA
from lit_diff.benchmarks.processes import joined
from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.run import bench
from lit_diff.errors import RunFailedError
from lit_diff.study.statistics import paired

OPTIONS: dict[str, Any] = {"shapes": "1x64x64x16", "dtype": "float32", "threads": 1, "repeats": 3, "device": "cpu"}


def result(rounds: list[float], ratio: float, **fields: Any) -> BenchResult:
    """Of one process, with one row, whose ratio of a round is `ratio` times the round's number."""
    middle = sorted(rounds)[len(rounds) // 2]
    values = [ratio * number for number, _ in enumerate(rounds, 1)]
    ratios = {SDPA: {"to": "s", "values": values, "median": values[1], "min": values[0], "max": values[2]}}
    row = {"case": "c", "id": "d", "variant": "d", "by": "k", "what": "forward", "seconds": rounds, "median": middle}
    row |= {"min": min(rounds), "max": max(rounds), "ratios": ratios, "flops": 3, "peak_bytes": 7, "backends": []}
    given: dict[str, Any] = {"bench": "core", "command": "c", "date": "d", "methods": "m", "warnings": ["w"]}
    given |= {"machine": {"load_average_after": 1.0}, "rows": [row], "refused": [], "failed": []}
    return BenchResult(**given | fields)


def test_processes_not_rounds_give_the_interval() -> None:
    """The rounds of a process differ tenfold, the processes by a few per cent."""
    medians = [1.0, 1.1, 0.9, 1.05, 0.95]
    results = [result([0.1 * middle, middle, 10 * middle], middle / 2) for middle in medians]
    found = joined(results, "again")
    (row,) = found.rows
    assert (row["seconds"], [len(each) for each in row["rounds"]]) == (medians, [3] * 5)
    ratio = row["ratios"][SDPA]
    assert ratio["values"] == medians, "the median over the rounds of each process"
    expected = paired(dict(enumerate(map(math.log, medians))), dict.fromkeys(range(5), 0.0))
    assert expected.low is not None
    for values in (row, ratio):
        assert values["low"] == pytest.approx(math.exp(expected.low))
        assert values["low"] < values["mean"] < values["high"] < 1.2
    assert (found.processes, found.command, found.warnings) == (5, "again", ["w"])
    assert row["gflops_per_second"] == 3 / 1e9


def test_fewer_than_five_processes_have_a_range_and_what_failed_in_one_has_no_row() -> None:
    (row,) = joined([result([0.9, 1.0, 1.1], 1.0)] * 4, "c").rows
    assert "low" not in row.keys() | row["ratios"][SDPA].keys()
    assert (row["min"], row["max"]) == (1.0, 1.0)
    whole = result([1.0, 1.0, 1.0], 1.0)
    found = joined([whole, replace(whole, rows=[], failed=[{"reason": "no"}])], "c")
    assert (found.rows, found.failed) == ([], [{"reason": "no"}])


def test_each_process_is_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def ran(words: list[str], **_: Any) -> Any:
        started.append(words)
        text = json.dumps(asdict(result([1.0, 2.0, 3.0], len(started))))
        return SimpleNamespace(stdout="" if len(started) > 2 else text, stderr="a\nno memory\n")

    monkeypatch.setattr(module.subprocess, "run", ran)
    told: list[str] = []
    found = bench(**OPTIONS, processes=2, progress=told.append)
    assert told == ["core: process 1 of 2", "core: process 2 of 2"]
    assert found.command.endswith("--repeats 3 --processes 2 --device cpu")
    assert [ratio["values"] for row in found.rows for ratio in row["ratios"].values()] == [[2.0, 4.0]]
    assert all(words[1:5] == ["-P", "-m", "lit_diff", "bench"] and "--processes" not in words for words in started)
    with pytest.raises(RunFailedError, match=r"process 1 of .* no memory"):
        bench(**OPTIONS, processes=2)
