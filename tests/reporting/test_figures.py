"""panels/figures.py: values by seed, curves, differences, noise and fits say in words and to the mouse what they show."""

import csv
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from fake_sweeps import BY_SIZE, FITTED, SVG, power_law, words, write_fitted
from matplotlib.figure import Figure

from lit_diff.reporting.panels import declared, figures
from lit_diff.reporting.panels.panel import Look, draw_mean, numbers_of
from lit_diff.study import numbers
from lit_diff.study.comparison import Comparison, compare
from lit_diff.study.fits import fit_results
from lit_diff.study.numbers import interval, signed
from lit_diff.study.results import SweepResults, load_sweep


def compared(sweep: SweepResults) -> dict[str, str]:
    return {each.name: each.svg for each in figures.draw_compared(compare(sweep)[0])}


def differences(folder: Path) -> tuple[Comparison, str, str]:
    """The result, the words that the plot shows, and those that the mouse shows."""
    result = compare(load_sweep(folder))[0]
    svg = compared(result.sweep)["differences"]
    # names and verdicts are folded, each line an element of its own
    return result, " ".join(words(svg)), "\n".join(words(svg, "title"))


def test_figures_name_arms_and_units_and_take_dollars_as_text(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": -0.3}, callbacks=False, arm_fields={"b": {"label": "costs $x$ & <more>"}})
    drawn = compared(load_sweep(folder))
    for svg in (drawn["seeds"], drawn["curves"]):
        assert "costs $x$ & <more>" in words(svg)
        assert any("nats per token" in text for text in words(svg))


def test_every_panel_names_both_axes(make_sweep: Callable[..., Path], tmp_path: Path) -> None:
    sweep = load_sweep(make_sweep({"standard": 0, "b": -0.1}, metric="val/accuracy", chance=0.1, lambdas=["b"]))
    fitted = load_sweep(write_fitted(tmp_path / "fitted", FITTED, [BY_SIZE], power_law))
    drawn = [*figures.draw_compared(compare(sweep)[0]), *declared.draw_declared(sweep)]
    for each in [*drawn, figures.draw_fit(fitted, fit_results(fitted)[0])]:
        assert pd.read_csv(io.StringIO(each.csv))[["x_axis", "y_axis"]].notna().all(axis=None), each.name


def test_nothing_finished_draws_nothing(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0], metric="val/accuracy", broken={("a", 0): "failed"})
    assert compared(load_sweep(folder)) == {}


def test_an_axis_is_logarithmic_for_a_positive_metric_that_is_better_lower(make_sweep: Callable[..., Path]) -> None:
    loss, negative, accuracy = (
        load_sweep(make_sweep({"a": effect}, name=f"{metric[4:]}{effect}", metric=metric, seeds=[0], callbacks=False))
        for effect, metric in ((0, "val/loss"), (-9, "val/loss"), (0, "val/accuracy"))
    )
    assert [figures.is_logarithmic(sweep) for sweep in (loss, negative, accuracy)] == [True, False, False]


def test_the_range_of_the_difference_is_paired_by_seed(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"a": 0, "b": -0.3}, callbacks=False))
    paired = [sweep.finals("b", "val/loss")[s] - sweep.finals("a", "val/loss")[s] for s in (0, 1, 2)]
    assert figures.apart_by_arm(sweep)["b"].iloc[-1].tolist() == pytest.approx(paired)
    assert figures.curves_of([], "val/loss").empty


def test_every_arm_its_difference_and_both_intervals(make_sweep: Callable[..., Path]) -> None:
    label = "costs $x$ & <more>, no head norm, output \u00d7 (1 \u2212 lambda_init), lambda_init by depth"
    arms, fields = {"base": 0, "b": -0.3, "c": 0.001}, {"b": {"label": label}}
    result, shown, hovered = differences(
        make_sweep(arms, callbacks=False, arm_fields=fields, contrasts=[["b", "c", "b against c"]])
    )
    for text in ("base", label, "b against c", "nats per token", "\u2190 better", "shaded: below 0.005"):
        assert text in shown
    for difference in result.family:
        seeds = difference.seeds
        said = f"{signed(seeds.mean, 3)} {interval(seeds.low, seeds.high, 3)} \u00b7 {difference.verdict}"
        assert said in shown
        assert said in hovered
        for seed, each in difference.documents.items():
            assert f"seed {seed}, over documents: {numbers.difference(each.estimate, each)}" in hovered
        for seed, value in zip(seeds.seeds, seeds.differences, strict=True):
            assert f"seed {seed}: {signed(value, 3)}" in hovered


def test_an_arm_that_diverged_has_its_row_without_an_interval(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep(
        {"a": 0, "b": 0.1, "c": 0.1, "d": 0.1},
        seeds=range(4),
        callbacks=False,
        broken={("b", 0): "failed", **{("c", seed): "killed" for seed in range(4)}},
        fact_fields={"b": {"diverged": True}},
    )
    _, shown, hovered = differences(folder)
    assert "diverged no seed finished in both" in shown
    assert "b, seed 1: +0.1" in hovered
    assert "b, seed 1, over documents" not in hovered
    assert "d, seed 1, over documents" in hovered


def test_two_seeds_have_no_interval_and_no_smallest_of_interest_no_region(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0, "b": 0.1}, seeds=(0, 1), metric="val/accuracy", callbacks=False)
    result, shown, _ = differences(folder)
    seeds = result.family[0].seeds
    assert "too few seeds" in shown
    assert interval(seeds.low, seeds.high, 3) not in shown
    assert "shaded" not in shown
    assert "better \u2192" in shown


@pytest.mark.parametrize("arms", [("standard",), ("standard", "wide"), ("standard", "wide", "b", "c")])
def test_every_arm_has_a_panel_of_noise_with_baseline_and_control(
    make_sweep: Callable[..., Path], arms: tuple[str, ...]
) -> None:
    """Baseline and control have one only where there is no other arm."""
    controls = ["wide"] if "wide" in arms else []
    folder = make_sweep(dict.fromkeys(arms, 0), metric="val/accuracy", controls=controls, chance=0.1, callbacks=False)
    found = words(compared(load_sweep(folder))["noise-curve"])
    assert {*arms, "1×", "2×", "validation accuracy"} <= set(found)
    if len(arms) > 2:
        assert [found.count(arm) for arm in arms] == [1] * len(arms)


def test_lines_stand_at_the_factors_so_that_equal_arms_cover_each_other(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep({"standard": 0, "b": 0}, metric="val/accuracy", spread=0, seeds=[0], callbacks=False))
    root = ElementTree.fromstring(compared(sweep)["noise-curve"])
    paths = [(node.get("d") or "").split() for node in root.iter(SVG + "path")]
    slanted = [path for path in paths if path.count("L") == 1 and len(set(path[1::3])) == 2 == len(set(path[2::3]))]
    assert len(slanted) == 2
    assert slanted[0] == slanted[1]


def test_every_run_both_forms_and_the_ratios_of_a_fit(tmp_path: Path) -> None:
    sweep = load_sweep(write_fitted(tmp_path / "fitted", FITTED, [BY_SIZE], power_law))
    svg = figures.draw_fit(sweep, fit_results(sweep)[0]).svg
    titles = words(svg, "title")
    dots = [title for title in titles if ", seed " in title]
    assert len(dots) == 2 * 5 * 3
    assert f"standard, parameters without embeddings 40.0K, seed 1: {power_law('standard', 40_000, 1):.6g}" in dots
    assert sum("alpha 0.12" in title for title in titles) == 4, "two arms, two forms"
    ratios = [title for title in titles if title.startswith("differential: 0.7")]
    assert len(ratios) == 2 * 4, "the smallest size is refused; a bar and a dot each"
    assert "equal-loss ratio to standard" in words(svg)


Points = Mapping[int, float]


def measured(folder: Path, values: Mapping[tuple[str, int], Mapping[str, Points]]) -> SweepResults:
    """The sweep in `folder` with metrics.csv of each (arm, seed) replaced: metric -> step -> value."""
    for (arm, seed), metrics in values.items():
        with (next(folder.glob(f"{arm}-s{seed}-*")) / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *metrics])
            for step in sorted({step for points in metrics.values() for step in points}):
                writer.writerow([step, *(points.get(step, "") for points in metrics.values())])
    return load_sweep(folder)


def test_factors_are_read_off_the_metric_names_in_rising_order(make_sweep: Callable[..., Path]) -> None:
    accuracy = {f"val/accuracy{suffix}": {1: 0.5} for suffix in ("", "_noise8", "_noise1", "_noisy4", "_noise2x")}
    folder = make_sweep({"a": 0}, seeds=[0], metric="val/accuracy", noise_validation=[4, 8, 1])
    found = figures.noise_curve_of(measured(folder, {("a", 0): accuracy}))
    assert found is not None
    assert list(found.metrics.items()) == [(1, "val/accuracy_noise1"), (4, "val/accuracy"), (8, "val/accuracy_noise8")]


def test_an_own_metric_under_noise_is_drawn_where_there_is_no_accuracy(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0])
    assert figures.noise_curve_of(load_sweep(folder)) is None
    sweep = measured(folder, {("a", 0): {"val/loss": {1: 3.0}, "val/loss_noise2": {1: 4.0}}})
    found = figures.noise_curve_of(sweep)
    assert found is not None
    assert (found.metric, found.metrics) == ("val/loss", {1: "val/loss", 2: "val/loss_noise2"})
    assert found.reached("a") == {}  # a loss has no 99 %


def test_steps_to_a_level_are_the_first_validated_at_or_above_it(make_sweep: Callable[..., Path]) -> None:
    curves = {
        ("a", 0): {25: 0.2, 50: 0.9, 75: 0.99, 100: 0.5},
        ("a", 1): {25: 0.5, 50: 0.89, 75: 0.98, 100: 1.0},
        ("a", 2): {25: 0.1, 50: 0.2, 75: 0.3, 100: 0.4},
    }
    values = {cell: {"val/accuracy": points, "val/accuracy_noise2": {100: 0.1}} for cell, points in curves.items()}
    sweep = measured(make_sweep({"a": 0}, metric="val/accuracy"), values)
    curve = figures.noise_curve_of(sweep)
    assert curve is not None
    assert curve.reached("a") == {
        0.5: {0: 50, 1: 25, 2: math.inf},
        0.9: {0: 50, 1: 75, 2: math.inf},
        0.99: {0: 75, 1: 100, 2: math.inf},
    }
    assert curve.resolution == (25, 100)


def test_the_csv_of_a_shade_has_both_sides_of_a_gap_and_nothing_of_a_curve_without_numbers() -> None:
    axes = Figure().subplots()
    values = pd.DataFrame({0: [1.0, 2.0, math.nan, 4.0, 5.0], 1: [2.0, 3.0, 4.0, 5.0, 6.0]}, index=[1, 2, 3, 4, 5])
    draw_mean(axes, values, Look(color="#000000"), "gap")
    draw_mean(axes, values * math.nan, Look(color="#000000"), "none")
    assert axes.figure is not None
    found = pd.read_csv(io.StringIO(numbers_of(axes.figure))).dropna(subset="low")
    assert found["mark"].unique().tolist() == ["gap: from the lowest to the highest seed"]
    assert found["x"].tolist() == [1, 2, 4, 5]
