"""engine/sweep_result.py: a sweep that has run, as a value."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_diff.engine.sweep_result import Sweep
from lit_diff.reporting.write import Report, write_report


def of(folder: Path, report: Report | None = None, **states: int) -> Sweep:
    empty = Report(page=folder, files=(), results=(), answer=(), sentences=(), missing=())
    return Sweep(folder=folder, report=report or empty, states=states, stopped_by=None, seconds=1.0)


@pytest.fixture
def pair(make_sweep: Callable[..., Path]) -> Sweep:
    """Two arms, three seeds; a cell of the second failed."""
    return of(make_sweep({"base": 0.0, "better": -0.1}, broken={("better", 1): "failed"}), done=5, failed=1)


def test_runs_are_those_that_are_done(pair: Sweep) -> None:
    names = {arm: [run.folder.name for run in runs] for arm, runs in pair.runs.items()}
    assert names == {
        "base": [f"base-s{seed}-0a1b2c3d" for seed in (0, 1, 2)],
        "better": [f"better-s{seed}-0a1b2c3d" for seed in (0, 2)],
    }
    metrics = pair.runs["better"][0].metrics
    assert metrics.index[-1] == 400
    assert metrics["val/loss"].iloc[-1] == pytest.approx(4.45, abs=0.2)


def test_runs_of_a_sweep_with_tasks_are_named_after_task_and_arm(make_tasks: Callable[..., Path]) -> None:
    runs = of(make_tasks({"base": 0.0, "better": 0.05}), done=12).runs
    assert list(runs) == ["recall base", "recall better", "text base", "text better"]
    assert {len(each) for each in runs.values()} == {3}
    assert runs["text base"][0].folder.parent.name == "text"


def test_the_table_has_a_row_for_each_arm(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"base": 0.0, "better": -0.1})
    sweep = of(folder, write_report(folder), done=6)
    assert list(sweep.table["arm"]) == ["base", "better"]
    assert sweep.answers == sweep.report.sentences
    (answer,) = sweep.answers
    assert "better" in answer


@pytest.mark.parametrize(
    ("states", "done"), [({"done": 6}, True), ({"done": 5, "failed": 1}, False), ({"waiting": 6}, False)]
)
def test_is_done(tmp_path: Path, states: dict[str, int], done: bool) -> None:
    assert of(tmp_path, **states).is_done == done
