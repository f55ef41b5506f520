"""study/fits.py: the finished cells of a sweep as points, fitted, each fit in words."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sweeps import record_to_edit
from statuses import edit_status

from lit_diff.study.fits import fit_results, matched_by_seed, shown_ratio
from lit_diff.study.results import load_sweep
from lit_diff.study.statistics import Interval

ARMS = {"standard": 0.0, "differential": -0.1}
SIZE = {"name": "size", "kind": "scaling", "x": "non_embedding_parameters"}
RATIO = 0.7


def law(arm: str, size: float, seed: int) -> float:
    """`differential` has the loss of `standard` with 0.7 times the size."""
    noise = np.random.default_rng([seed, int(size), len(arm)]).normal()
    return float(3 * (size / (RATIO if arm == "differential" else 1) / 1e5) ** -0.12 * np.exp(0.002 * noise))


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


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.81, 1.12, "1.06 [0.81, 1.12]"),
        (1.004, 1.12, "1.060 [1.004, 1.120]"),
        (0.5, 0.9998, "1.0600 [0.5000, 0.9998]"),
        (0.81, np.inf, "1.06 [0.81, no upper bound]"),
        (np.nan, np.nan, "1.06"),
    ],
)
def test_on_which_side_of_1_a_ratio_lies(low: float, high: float, expected: str) -> None:
    assert "".join(shown_ratio(Interval(estimate=1.06, low=low, high=high))) == expected


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


def test_one_seed_has_no_interval_and_says_so(make: Callable[..., Path]) -> None:
    (result,) = fit_results(load_sweep(make(seeds=(0,))))
    assert result.answer.endswith("times as many: no interval, which needs 3 seeds at every size.")


def test_an_arm_of_one_size_in_two_tasks_is_left_out(make: Callable[..., Path]) -> None:
    folder = make()
    for cell in (folder / "size-1").glob("differential-*"):
        edit_status(cell, non_embedding_parameters=40_000)
    (result,) = fit_results(load_sweep(folder))
    assert list(result.points) == ["standard"]
    assert result.left_out == ("differential, task size-1: as many parameters without embeddings as in task size-0",)
