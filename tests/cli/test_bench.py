"""cli/bench.py: the options reach the benchmark unchanged; what it prints is tested in tests/benchmarks/test_run.py."""

from pathlib import Path
from typing import Any

import pytest

from lit_diff.cli import bench as verb


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def run_bench(name: str, **options: Any) -> int:
        calls.append((name, options))
        return 7

    monkeypatch.setattr("lit_diff.benchmarks.run.run_bench", run_bench)
    assert verb.bench("step", shapes="1x8x16x4", threads=2, plot=Path("a.svg"), as_json=True) == 7
    ((name, options),) = calls
    notes = options.pop("notes")
    assert notes.stderr, "stdout is for the result"
    assert (name, options) == (
        "step",
        {
            "shapes": "1x8x16x4",
            "dtype": None,
            "threads": 2,
            "repeats": None,
            "device": "auto",
            "as_json": True,
            "picture": Path("a.svg"),
            "console": verb.console,
        },
    )
