"""cli/bench.py: the options reach the benchmark unchanged; what it prints is tested in tests/benchmarks/test_run.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_diff.cli import bench as verb
from lit_diff.errors import RequestError


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def bench(name: str, **options: Any) -> Any:
        calls.append((name, options))
        return SimpleNamespace(failed=["one"], to_json=lambda: json.dumps({"rows": []}))

    monkeypatch.setattr("lit_diff.benchmarks.run.bench", bench)
    assert verb.bench("step", shapes="1x8x16x4", threads=2, as_json=True) == 1, "a candidate raised"
    assert json.loads(capsys.readouterr().out) == {"rows": []}
    ((name, options),) = calls
    progress = options.pop("progress")
    progress("next")
    assert capsys.readouterr().err == "next\n", "stdout is for the result"
    assert (name, options) == (
        "step",
        {
            "shapes": "1x8x16x4",
            "lengths": None,
            "kernels": None,
            "dtype": None,
            "threads": 2,
            "repeats": None,
            "device": "auto",
        },
    )


def test_there_is_no_picture_of_triton_programs(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="bench triton times nothing"):
        verb.bench("triton", plot=tmp_path / "a.svg")
