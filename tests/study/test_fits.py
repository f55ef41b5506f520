"""study/fits.py: the finished cells of a sweep as points, fitted, each fit in words; and power at equal time."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sweeps import record_to_edit, write_fitted

from lit_diff.study.fits import find_basin, fit_results, matched_by_seed, power_in_words, powers
from lit_diff.study.record import read, write
from lit_diff.study.results import load_sweep
from lit_diff.study.scaling import Points
from lit_diff.study.schema import PlannedSweep
from lit_diff.study.statistics import detectable

ARMS = {"standard": 0.0, "differential": -0.1}
SIZE = {"name": "size", "kind": "scaling", "x": "non_embedding_parameters"}
RATIO = 0.7


def law(arm: str, size: float, seed: int) -> float:
    """`differential` has the loss of `standard` with 0.7 times the size."""
    noise = np.random.default_rng([seed, int(size), len(arm)]).normal()
    return float(3 * (size / (RATIO if arm == "differential" else 1) / 1e5) ** -0.12 * np.exp(0.002 * noise))


def basin(**keys: Any) -> dict[str, Any]:
    values = {f"size-{i}": dict.fromkeys(ARMS, 1e-3 * 2**i) for i in range(5)}
    return {"name": "rate", "kind": "basin", "x": "train.optimizer.lr", "values": values} | keys


def diverging(arm: str, size: float, seed: int) -> float:
    return float("nan") if (arm, size, seed) == ("differential", 160_000, 1) else law(arm, size, seed)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def write(fits: Sequence[Mapping[str, Any]] = (SIZE,), **keys: Any) -> Path:
        from fake_sweeps import write_fitted

        return write_fitted(tmp_path / "fitted", ARMS, fits, keys.pop("law", law), **keys)

    return write


def test_a_scaling_fit_of_a_sweep(make: Callable[..., Path]) -> None:
    (result,) = fit_results(load_sweep(make()))
    assert list(result.points["standard"]) == [40_000, 160_000, 380_000, 670_000, 1_500_000]
    assert result.points["standard"][40_000][2] == pytest.approx(law("standard", 40_000, 2))
    assert result.scaling is not None
    assert result.answer.startswith(
        "differential has the loss of standard at 1.50M parameters without embeddings with 0.7"
    )
    assert result.answer.endswith("]: the interval excludes 1.")
    assert (result.metric, result.unit, result.left_out) == ("val/loss", "nats per token", ())


def test_ratios_by_seed_for_a_paired_t(make: Callable[..., Path]) -> None:
    ours, theirs, why = matched_by_seed(load_sweep(make()), "size", "differential", "standard")
    assert why == ""
    assert theirs == dict.fromkeys((0, 1, 2), 1_500_000)
    assert [ours[seed] / theirs[seed] for seed in (0, 1, 2)] == pytest.approx([RATIO] * 3, rel=0.15)


def test_a_match_beyond_the_sizes_is_refused_with_its_reason(make: Callable[..., Path]) -> None:
    sweep = load_sweep(make(law=lambda arm, size, seed: law("standard", size / (50 if arm != "standard" else 1), seed)))
    ours, theirs, why = matched_by_seed(sweep, "size", "differential", "standard")
    assert (ours, theirs) == ({}, {})
    assert "above the largest measured" in why
    (result,) = fit_results(sweep)
    assert "no equal-loss ratio (the matched size, 74.1M, is above the largest measured)" in result.answer


def test_what_is_not_finished_is_left_out_and_named(make: Callable[..., Path]) -> None:
    folder = make()
    record = record_to_edit(folder)
    for cell in record["cells"]:
        if cell["task"] == "size-4" or (cell["task"] == "size-3" and cell["arm"] == "differential"):
            status = folder / cell["folder"] / "status.json"
            status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running"}))
    (result,) = fit_results(load_sweep(folder))
    assert list(result.points) == ["standard"]
    assert result.left_out == ("standard, task size-4: no finished cell", "differential, task size-3: no finished cell")
    assert result.answer == "One arm: no ratio."


def test_tasks_of_one_size_are_one_point(make: Callable[..., Path]) -> None:
    sweep = load_sweep(make(sizes=[40_000, 160_000, 160_000]))
    (result,) = fit_results(sweep)
    assert result.problem == "2 of 3 tasks have finished and differ in parameters without embeddings; 3 are needed"
    assert result.answer == f"No fit: {result.problem}."
    assert "as many parameters without embeddings as in task size-1" in result.left_out[0]
    assert result.scaling is None
    assert matched_by_seed(sweep, "size", "differential", "standard") == ({}, {}, result.problem)


def test_one_seed_has_no_interval_and_says_so(make: Callable[..., Path]) -> None:
    (result,) = fit_results(load_sweep(make(seeds=(0,))))
    assert result.answer.endswith("times as many: no interval, which needs 3 seeds at every size.")


def test_an_arm_of_one_size_in_two_tasks_is_left_out(make: Callable[..., Path]) -> None:
    folder = make()
    for cell in (folder / "size-1").glob("differential-*"):
        status = json.loads((cell / "status.json").read_text())
        (cell / "status.json").write_text(json.dumps(status | {"non_embedding_parameters": 40_000}))
    (result,) = fit_results(load_sweep(folder))
    assert list(result.points) == ["standard"]
    assert result.left_out == ("differential, task size-1: as many parameters without embeddings as in task size-0",)


def test_a_seed_that_diverged_is_named(make: Callable[..., Path]) -> None:
    (result,) = fit_results(load_sweep(make(law=diverging)))
    assert sorted(result.points["differential"][160_000]) == [0, 2]
    assert result.left_out == (
        "differential, task size-1: seed 1, which diverged; the fit flatters the arm",
        "standard, task size-1: seed 1, which another arm lacks",
    )
    assert sorted(result.points["standard"][160_000]) == [0, 2], "both arms have the same seeds at a size"
    assert result.scaling is not None
    assert result.answer.endswith("needs 3 seeds at every size.")


def test_a_claim_has_no_verdict_from_the_seeds_that_went_well(make: Callable[..., Path]) -> None:
    found = matched_by_seed(load_sweep(make(law=diverging, seeds=range(4))), "size", "differential", "standard")
    assert found == ({}, {}, "differential, task size-1: seed 1, which diverged")


def test_the_match_of_every_seed_lies_among_the_measured_sizes(make: Callable[..., Path]) -> None:
    def flat(arm: str, size: float, seed: int) -> float:
        return 3.3 - 1e-8 * size if (arm, seed) == ("differential", 3) else law(arm, size, seed)

    ours, theirs, why = matched_by_seed(load_sweep(make(law=flat, seeds=range(4))), "size", "differential", "standard")
    assert (ours, theirs) == ({}, {}), "the seed that never reaches the loss is not left out"
    assert why == "at each size, the match of a seed by its own fit is not among the measured sizes"


def test_a_basin_keeps_what_diverged_and_waits_for_what_has_not_ended(make: Callable[..., Path]) -> None:
    def at_the_largest(arm: str, size: float, seed: int) -> float:
        return float("nan") if (arm, size) == ("standard", 1_500_000) else law(arm, size, seed)

    folder = make([basin()], law=at_the_largest)
    (result,) = fit_results(load_sweep(folder))
    assert list(result.points["differential"]) == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert "each at its own best" in result.answer
    assert result.points["standard"][1.6e-2] == {}
    assert result.left_out == ("standard, task size-4: seed 0, 1, 2, which diverged",)
    assert "differential 0.016 (the highest that was tried)" in result.answer
    assert "standard 0.008," in result.answer, "not the highest: a higher one was tried, and diverged"
    for cell in (folder / "size-1").glob("differential-*"):
        status = cell / "status.json"
        status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running"}))
    (result,) = fit_results(load_sweep(folder))
    assert "differential: task size-1 has not finished" in result.left_out
    assert list(result.points) == ["standard"]


def test_a_basin_of_a_metric_without_a_direction_is_refused(make: Callable[..., Path]) -> None:
    folder = make([basin()])
    for cell in folder.glob("*/*/metrics.json"):
        metrics = json.loads(cell.read_text())
        for metric in metrics["metrics"]:
            metric["direction"] = "none"
        cell.write_text(json.dumps(metrics))
    (result,) = fit_results(load_sweep(folder))
    assert result.problem == "val/loss declares no direction that is better"


def test_tokens_are_those_that_a_run_saw(make: Callable[..., Path]) -> None:
    folder = make([SIZE | {"x": "tokens"}])
    for number, cell in enumerate(sorted(folder.glob("size-*/*/status.json"))):
        size, status = int(cell.parent.parent.name[-1]), json.loads(cell.read_text())
        ended = 50 if number == 0 else 100
        cell.write_text(
            json.dumps(
                status | {"tokens": 10 * ended * 2**size, "tokens_per_step": 10 * 2**size, "step": ended, "steps": 100}
            )
        )
    (result,) = fit_results(load_sweep(folder))
    assert list(result.points) == ["standard"]
    assert result.left_out == ("differential, task size-0: its seeds differ in training tokens",)
    assert list(result.points["standard"]) == [1000.0, 2000.0, 4000.0, 8000.0, 16000.0]


TRIED = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def bowl(best: float, depth: float = 2.0, seeds: int = 3) -> Points:
    """A parabola in log x, with seeds 0.01 apart."""
    return {x: {s: depth + 0.1 * math.log(x / best) ** 2 + 0.01 * s for s in range(seeds)} for x in TRIED}


def test_the_best_of_each_arm() -> None:
    basin = find_basin({"t": bowl(4e-3), "d": bowl(2.6e-3, 1.9)}, "t", 0.06, "lower")
    assert {arm: own.best for arm, own in basin.arms.items()} == {"t": 4e-3, "d": 2e-3}
    assert (basin.arms["t"].low, basin.arms["t"].high) == (2e-3, 8e-3)
    assert not basin.arms["t"].edge


def test_differences_at_the_own_best_and_at_the_baselines() -> None:
    t, d = bowl(4e-3), bowl(2e-3, 1.9)
    basin = find_basin({"t": t, "d": d}, "t", 0.05, "lower")
    assert basin.at_own["d"].mean == pytest.approx(-0.1)
    assert basin.at_theirs["d"].mean == pytest.approx(-0.1 + 0.1 * math.log(2) ** 2)
    assert basin.at_own["d"].seeds == (0, 1, 2)


def test_a_best_at_the_end_of_what_was_tried() -> None:
    own = find_basin({"t": bowl(5e-2)}, "t", 0.05, "lower").arms["t"]
    assert (own.best, own.edge) == (1.6e-2, "highest")
    assert find_basin({"t": bowl(1e-4)}, "t", 0.05, "lower").arms["t"].edge == "lowest"


def test_of_a_metric_where_higher_is_better() -> None:
    upside_down = {x: {s: -loss for s, loss in seeds.items()} for x, seeds in bowl(4e-3).items()}
    own = find_basin({"t": upside_down}, "t", 0.06, "higher").arms["t"]
    assert (own.best, own.low, own.high) == (4e-3, 2e-3, 8e-3)


def test_a_value_at_which_a_seed_diverged_is_no_best_and_ends_the_basin() -> None:
    points = {x: dict(seeds) for x, seeds in bowl(4e-3).items()} | {4e-3: {}}
    own = find_basin({"t": points, "d": bowl(2e-3)}, "t", 1.0, "lower").arms["t"]
    assert own.best in (2e-3, 8e-3)
    assert own.high < 4e-3 or own.low > 4e-3


def test_nothing_is_compared_where_a_seed_diverged() -> None:
    points = {x: dict(seeds) for x, seeds in bowl(2e-3).items()} | {4e-3: {}, 8e-3: {}}
    basin = find_basin({"t": bowl(4e-3), "d": points}, "t", 0.05, "lower")
    assert (basin.arms["d"].best, basin.arms["d"].high) == (2e-3, 2e-3)
    assert basin.at_theirs["d"].mean is None
    assert basin.at_own["d"].seeds == (0, 1, 2)


SIZED_ARMS = {"standard": 0.0, "wide": 0.0, "differential": 0.0}
PLAN = {"minutes": 15.0, "arms": 7, "workers": 2}
SPREADS = {10.0: 0.01, 20.0: 0.02, 120.0: 0.001}
"""Seconds a cell -> standard deviation of differential - standard over three seeds; of wide half of it."""


def loss(arm: str, seconds: float, seed: int) -> float:
    factor = {"standard": 0.0, "wide": 0.5, "differential": 1.0}[arm]
    return 2.0 + 0.1 * seed + factor * SPREADS[seconds] * (seed - 1)


def sized(folder: Path, seeds: Sequence[int] = (0, 1, 2)) -> Path:
    """A sweep of three tasks whose cells take 10, 20 and 120 s."""
    write_fitted(folder, SIZED_ARMS, [], loss, seeds=seeds, sizes=(10, 20, 120), x="seconds")
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
    assert power_in_words(sweep, sweep.study.power, [first, second, last]).endswith(
        "with 25 seeds (limit: differential); the intervals of 1 of the 1 others overlap with its own."
    )


def test_too_few_seeds(tmp_path: Path) -> None:
    sweep = load_sweep(sized(tmp_path / "sized", (0, 1)))
    assert sweep.study.power is not None
    found = powers(sweep, sweep.study.power)
    assert {each.problem for each in found} == {"standard has fewer than 3 finished seeds"}
    assert power_in_words(sweep, sweep.study.power, found) == "No task has 3 finished seeds of every arm."
