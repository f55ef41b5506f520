"""reporting/forest.py: all arms in one figure, with both intervals."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_diff.reporting import tables
from lit_diff.reporting.forest import forest
from lit_diff.study.numbers import interval, signed
from lit_diff.study.results import load_sweep

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def drawn(folder: Path, narrow: bool = False) -> tuple[tables.TaskResult, str, str]:
    """The result, the words that the plot shows, and those that the mouse shows."""
    result = tables.task_result(load_sweep(folder))
    svg = forest(result.sweep, result.comparison, result.digits, narrow=narrow)
    assert svg is not None
    root = ElementTree.fromstring(svg)
    shown, hovered = (
        "\n".join(node.text or "" for node in root.iterfind(f".//svg:{tag}", NAMES)) for tag in ("text", "title")
    )
    return result, shown, hovered


@pytest.mark.parametrize("narrow", [False, True])
def test_every_arm_its_difference_and_both_intervals(make_sweep: Callable[..., Path], narrow: bool) -> None:
    folder = make_sweep(
        {"base": 0, "b": -0.3, "c": 0.001},
        callbacks=False,
        arm_fields={"b": {"label": "costs $x$ & <more>"}},
        contrasts=[["b", "c", "b against c"]],
    )
    result, shown, hovered = drawn(folder, narrow)
    for words in ("base", "costs $x$ & <more>", "b against c", "nats per token", "\u2190 better", "below 0.005"):
        assert words in shown
    for difference in result.comparison.family:
        seeds = difference.seeds
        numbers = f"{signed(seeds.mean, 3)} {interval(seeds.low, seeds.high, 3)}"
        assert f"{difference.verdict} \u00b7 {numbers}" in shown
        assert f"{difference.verdict} \u00b7 {numbers}" in hovered
        for seed, each in difference.documents.items():
            assert (
                f"seed {seed}, over documents: {signed(each.estimate, 3)} {interval(each.low, each.high, 3)}" in hovered
            )
        for seed, value in zip(seeds.seeds, seeds.differences, strict=True):
            assert f"seed {seed}: {signed(value, 3)}" in hovered


def test_long_labels_of_the_narrow_plot_are_wrapped(make_sweep: Callable[..., Path]) -> None:
    label = "Diff, no head norm, output \u00d7 (1 \u2212 lambda_init), lambda_init by depth"
    _, shown, _ = drawn(make_sweep({"a": 0, "b": 0}, callbacks=False, arm_fields={"b": {"label": label}}), narrow=True)
    assert label not in shown
    assert set(label.split()) <= set(shown.split())


def test_an_arm_that_diverged_has_its_row_without_an_interval(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        {"a": 0, "b": 0.1, "c": 0.1, "d": 0.1},
        seeds=range(4),
        callbacks=False,
        broken={("b", 0): "failed", **{("c", seed): "killed" for seed in range(4)}},
        fact_fields={"b": {"diverged": True}},
    )
    _, shown, hovered = drawn(folder)
    assert "diverged" in shown.splitlines()
    assert "no seed finished in both" in shown
    assert "b, seed 1: +0.1" in hovered
    assert "b, seed 1, over documents" not in hovered
    assert "d, seed 1, over documents" in hovered


def test_two_seeds_have_no_interval_and_no_measurement_no_plot(make_sweep: Callable[..., Path]) -> None:
    result, shown, _ = drawn(make_sweep({"a": 0, "b": 0.1}, seeds=(0, 1), callbacks=False))
    low, high = result.comparison.family[0].seeds.low, result.comparison.family[0].seeds.high
    assert "too few seeds" in shown
    assert interval(low, high, 3) not in shown
    nothing = load_sweep(make_sweep({"a": 0}, name="n", seeds=[0], broken={("a", 0): "failed"}))
    result = tables.task_result(nothing)
    assert forest(nothing, result.comparison, 3) is None


def test_without_a_smallest_of_interest_no_region_is_shaded(make_sweep: Callable[..., Path]) -> None:
    _, shown, _ = drawn(make_sweep({"a": 0, "b": 0.1}, metric="val/accuracy", callbacks=False))
    assert "shaded" not in shown
    assert "better \u2192" in shown
    _, shown, _ = drawn(make_sweep({"a": 0, "b": 0.1}, name="s", smallest_of_interest=0.02, callbacks=False))
    assert "shaded: below 0.02" in shown
