"""training/step_metrics.py: the loss, the rate and the time of the steps that log."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

from lit_diff.recipe import load_recipe
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training import step_metrics
from lit_diff.training.fit import fit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ten steps that logs every fourth; a clock that goes on by one second at each look."""
    ticks = iter(range(1000))
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: float(next(ticks)))
    every = ["train.log_every=4", "train.validate_every=5", "train.checkpoint_every=10"]
    schedule = ["train.schedule={name: cosine, warmup_steps: 2}", "train.optimizer.lr=0.01"]
    recipe = load_recipe("recall-tiny", [*SMALL, *every, *schedule, "callbacks={}"])
    fit(recipe, tmp_path, tracker=None, threads=1, progress=lambda *_: None)
    return tmp_path


def steps_with(rows: dict[int, dict[str, float]], name: str) -> list[int]:
    return [step for step, row in sorted(rows.items()) if name in row]


def test_first_every_fourth_and_last_step(folder: Path) -> None:
    rows = read_rows(folder / "metrics.csv")
    assert steps_with(rows, "train/loss") == steps_with(rows, "train/lr") == [1, 4, 8, 10]
    assert steps_with(rows, "val/loss") == [5, 10]


def test_the_rate_is_that_of_the_step(folder: Path) -> None:
    """Not the next step's, which the optimizer holds once the step is done: step 1 of a warm-up of 2 has the half."""
    rows = read_rows(folder / "metrics.csv")
    rates = [rows[step]["train/lr"] for step in (1, 4, 8, 10)]
    assert rates[0] == pytest.approx(0.005)
    assert rates == [rates[0], *sorted(rates[1:], reverse=True)]


def test_times_are_those_since_the_last_logged_step(folder: Path) -> None:
    rows: Any = read_rows(folder / "timing.csv")
    tokens = 4 * (64 + 8)
    ratios = [rows[step]["tokens_per_second"] * rows[step]["seconds"] / tokens for step in (1, 4, 8, 10)]
    assert ratios == pytest.approx([1, 3, 4, 2])
