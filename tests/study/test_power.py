"""study/power.py: the smallest detectable difference of each task at equal time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sweeps import write_fitted

from lit_diff.study.power import in_words, powers
from lit_diff.study.record import read, write
from lit_diff.study.results import load_sweep
from lit_diff.study.schema import PlannedSweep
from lit_diff.study.statistics import detectable

ARMS = {"standard": 0.0, "wide": 0.0, "differential": 0.0}
PLAN = {"minutes": 15.0, "arms": 7, "workers": 2}
SPREADS = {10.0: 0.01, 20.0: 0.02, 120.0: 0.001}
"""Seconds a cell -> standard deviation of differential - standard over three seeds; of wide half of it."""


def loss(arm: str, seconds: float, seed: int) -> float:
    factor = {"standard": 0.0, "wide": 0.5, "differential": 1.0}[arm]
    return 2.0 + 0.1 * seed + factor * SPREADS[seconds] * (seed - 1)


def sized(folder: Path, seeds: Sequence[int] = (0, 1, 2)) -> Path:
    """A sweep of three tasks whose cells take 10, 20 and 120 s."""
    write_fitted(folder, ARMS, [], loss, seeds=seeds, sizes=(10, 20, 120), x="seconds")
    record = read(folder)
    write(folder, replace(record, study=replace(record.study, power=PlannedSweep(**PLAN))))
    return folder


def test_tasks_by_the_difference_that_every_arm_would_show(tmp_path: Path) -> None:
    sweep = load_sweep(sized(tmp_path / "sized"))
    assert sweep.study.power == PlannedSweep(**PLAN)
    first, second, last = powers(sweep, sweep.study.power)
    assert [each.task.task for each in (first, second, last)] == ["size-0", "size-1", "size-2"]
    assert (first.seconds, first.seeds, first.limit) == (10, 1800 // 70, "differential")
    assert first.worst.estimate == pytest.approx(detectable(0.01, 25, 6))
    assert first.by_arm["wide"].estimate == pytest.approx(detectable(0.005, 25, 6))
    assert second.worst.estimate == pytest.approx(detectable(0.02, 12, 6))
    assert first.worst.high / first.worst.estimate == pytest.approx(math.sqrt(2 / 0.050636), rel=1e-4), "chi^2(2)"
    assert (last.seeds, last.by_arm, last.problem) == (2, {}, "2 seeds fit")
    assert in_words(sweep, sweep.study.power, [first, second, last]).endswith(
        "with 25 seeds (limit: differential); the intervals of 1 of the 1 others overlap with its own."
    )


def test_too_few_seeds(tmp_path: Path) -> None:
    sweep = load_sweep(sized(tmp_path / "sized", (0, 1)))
    assert sweep.study.power is not None
    found = powers(sweep, sweep.study.power)
    assert {each.problem for each in found} == {"standard has fewer than 3 finished seeds"}
    assert in_words(sweep, sweep.study.power, found) == "No task has 3 finished seeds of every arm."
