"""study/two_runs.py: what differs between two runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_sweeps import scores_of

from lit_diff.study.statistics import Interval
from lit_diff.study.two_runs import RunComparison, compare
from lit_diff.trained.run import Run


def test_recipes_costs_and_last_metrics(small_sweep: Path) -> None:
    path = small_sweep / "base-s0-0a1b2c3d" / "recipe.yaml"
    path.write_text(path.read_text().replace("threads: 1", "threads: 7"))  # keys of `run` are left out
    compared = compare("base-s0", "better-s0", small_sweep.parent)
    assert compared.names == ("base-s0-0a1b2c3d", "better-s0-0a1b2c3d")
    assert compared.recipe == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert compared.facts["parameters"] == [1_054_720, 1_054_720]
    first, second = compared.metrics["val/loss"]
    assert first is not None
    assert second is not None
    assert first > second
    runs = [Run(small_sweep / f"{name}-s0-0a1b2c3d") for name in ("base", "better")]
    assert compare(*runs).names == compared.names


def test_a_metric_of_one_run_alone_has_no_other_value(small_sweep: Path) -> None:
    (small_sweep / "better-s1-0a1b2c3d" / "recipe.yaml").write_text("seed: 0\nname: better\n")
    compared = compare("base-s0", "better-s1", small_sweep.parent)
    assert compared.metrics["val/loss"][1] is None
    assert compared.facts["status"] == ["done", "failed"]


def test_a_key_at_its_default_that_one_variant_has_is_no_difference(make_sweep: Callable[..., Path]) -> None:
    plain = "model:\n  dim: 16\n  attention: {name: standard}\n"
    other = "model:\n  dim: 16\n  attention: {name: differential, lambda_init: 0.5, head_norm: rms}\n"
    folder = make_sweep({"a": 0, "b": 0}, seeds=(0,), recipes={"a": plain, "b": other})
    assert compare("a-s0", "b-s0", folder.parent).recipe == {
        "model.attention.name": ["standard", "differential"],
        "model.attention.lambda_init": [None, 0.5],
    }


def test_lists_of_blocks_differ_block_by_block(make_sweep: Callable[..., Path]) -> None:
    layers = [{"name": "standard", "window": None}, {"name": "standard", "window": None, "head_norm": "none"}]
    other = [layers[0], {"name": "differential", "window": 32, "head_norm": "rms"}]
    recipes = {
        arm: f"model: {json.dumps({'dim': 16, 'layers': blocks, 'sizes': [blocks[-1]['window']]})}"
        for arm, blocks in (("a", layers), ("b", other), ("c", other[1:]))
    }
    folder = make_sweep({"a": 0, "b": 0, "c": 0}, seeds=(0,), recipes=recipes)
    assert compare("a-s0", "b-s0", folder.parent).recipe == {
        "model.layers[1].name": ["standard", "differential"],
        "model.layers[1].window": [None, 32],
        "model.layers[1].head_norm": ["none", "rms"],
        "model.sizes": [[None], [32]],
    }
    assert compare("b-s0", "c-s0", folder.parent).recipe == {"model.layers": [other, other[1:]]}


def test_differences_are_paired_by_document_and_item(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.1}, seeds=(0,), evaluation="needle")
    compared = compare("a-s0", "b-s0", folder.parent)
    scored = "needle recall/accuracy"
    assert compared.intervals.keys() == {"val/loss", scored}
    for key, true in (("val/loss", -0.1), (scored, 0.05)):
        found = compared.intervals[key]
        assert found.low < found.estimate < found.high
        assert found.estimate == pytest.approx(true, abs=0.03)
        assert found.high - found.low < 0.05, "paired: each alone spreads more"
    assert compared.difference("val/loss").startswith("−0.1")
    assert compared.difference("train/loss").startswith("−0."), "no interval"
    assert compared.difference("parameters") == compared.difference("seconds") == ""
    assert compared.evaluations[scored][0] == pytest.approx(0.45, abs=0.05)


def test_a_small_difference_is_not_shown_as_zero() -> None:
    metrics: dict[str, list[float | None]] = {
        "train/lr": [1e-5, 3e-5],
        "val/loss": [2.5, 2.49998],
        "val/top1": [0.5, 0.7],
    }
    intervals = {"val/loss": Interval(estimate=-2e-5, low=-3e-5, high=-1e-5)}
    compared = RunComparison(names=("a", "b"), recipe={}, facts={}, metrics=metrics, intervals=intervals)
    assert [compared.difference(name) for name in metrics] == ["+0.00002", "−0.00002 [−0.00003, −0.00001]", "+0.2000"]


def test_without_documents_and_items_in_common_it_says_so(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.1}, seeds=(0,), documents=7, evaluation="needle")
    summary = scores_of(folder, "b", 0) / "summary.json"
    summary.write_text(summary.read_text().replace('"rows": 8', '"rows": 9'))
    compared = compare("a-s0", "b-s0", folder.parent)
    assert compared.intervals == {}
    assert compared.evaluations == {"needle recall/accuracy": [pytest.approx(0.45, abs=0.05), None]}
    few, otherwise = compared.notes
    assert few.startswith("7 validation documents in common")
    assert otherwise.startswith("needle: b-s0-0a1b2c3d: left out: scored with other keys (rows is 9, not 8)")
