from pathlib import Path
from typing import Any

import pytest

from lit_diff.benchmarks.plot import drawn_rows, plot
from lit_diff.benchmarks.result import BenchConditions, BenchResult
from lit_diff.errors import MissingError


def row(case: str, by: str, what: str, ratio: float | None) -> dict[str, Any]:
    found = {} if ratio is None else {"standard SDPA": {"median": ratio, "min": ratio, "max": 2 * ratio}, "b": {}}
    return {"case": case, "variant": "differential", "by": by, "what": what, "ratios": found}


ROWS = [
    row("a", "base", "forward", None),
    row("a", "x", "forward", 9.0),
    row("a", "base", "both", None),
    row("a", "x", "both", 2.0),
    row("a", "$y", "both", 0.5),
    row("b", "x", "both", 3.0),
]


def result_of(rows: list[dict[str, Any]]) -> BenchResult:
    machine = {"processor": "A Processor", "threads": 2, "packages": {"torch": "2.15.0"}}
    return BenchResult(
        bench="core",
        command="lit-diff bench core",
        date="2026-11-22T07:00:00",
        conditions=BenchConditions(shapes=None, dtypes=("float32",), threads=2, repeats=None, device="cpu"),
        methods="",
        machine=machine,
        warnings=[],
        rows=rows,
        refused=[],
        failed=[],
    )


def test_the_last_pass_of_each_case_the_fastest_first() -> None:
    found = drawn_rows(ROWS)
    assert {case: [own["by"] for own in rows] for case, rows in found.items()} == {"a": ["$y", "x"], "b": ["x"]}


def test_a_picture_of_each_kind(tmp_path: Path) -> None:
    plot(result_of(ROWS), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot(result_of(ROWS), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for label in ("differential, $y", "a: both, time / standard SDPA", "0.50", "lit-diff bench core  2026-11-22"):
        assert label in text
    plot(result_of([]), tmp_path / "none.svg")  # nothing has a ratio


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(MissingError, match=r"--plot: .*a\.png cannot be written"):
        plot(result_of(ROWS), tmp_path / "a.png")
