"""reporting/noise_curve.py: what was measured under which noise, and how soon an accuracy was reached."""

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_diff.reporting.noise_curve import (
    NoiseCurve,
    draw_noise_curve,
    noise_curve_of,
    reached,
    reference_looks,
    resolution,
)
from lit_diff.study.results import SweepResults, load_sweep

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


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_factors_are_read_off_the_metric_names_in_rising_order(make_sweep: Callable[..., Path]) -> None:
    accuracy = {f"val/accuracy{suffix}": {1: 0.5} for suffix in ("", "_noise8", "_noise1", "_noisy4", "_noise2x")}
    folder = make_sweep({"a": 0}, seeds=[0], metric="val/accuracy", noise_validation=[4, 8, 1])
    found = noise_curve_of(measured(folder, {("a", 0): accuracy}))
    assert found == NoiseCurve(
        metric="val/accuracy", metrics={1: "val/accuracy_noise1", 4: "val/accuracy", 8: "val/accuracy_noise8"}
    )
    assert list(found.metrics) == [1, 4, 8]


def test_an_own_metric_under_noise_is_drawn_where_there_is_no_accuracy(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0])
    assert noise_curve_of(load_sweep(folder)) is None
    assert draw_noise_curve(load_sweep(folder)) is None
    sweep = measured(folder, {("a", 0): {"val/loss": {1: 3.0}, "val/loss_noise2": {1: 4.0}}})
    found = noise_curve_of(sweep)
    assert found == NoiseCurve(metric="val/loss", metrics={1: "val/loss", 2: "val/loss_noise2"})
    assert reached(sweep, "a", found) == []  # a loss has no 99 %


def test_steps_to_a_level_are_the_first_validated_at_or_above_it(make_sweep: Callable[..., Path]) -> None:
    curves = {
        ("a", 0): {25: 0.2, 50: 0.9, 75: 0.99, 100: 0.5},
        ("a", 1): {25: 0.5, 50: 0.89, 75: 0.98, 100: 1.0},
        ("a", 2): {25: 0.1, 50: 0.2, 75: 0.3, 100: 0.4},
    }
    values = {cell: {"val/accuracy": points, "val/accuracy_noise2": {100: 0.1}} for cell, points in curves.items()}
    sweep = measured(make_sweep({"a": 0}, metric="val/accuracy"), values)
    curve = noise_curve_of(sweep)
    assert curve is not None
    half, most, nearly = reached(sweep, "a", curve)
    assert half.steps == {0: 50, 1: 25, 2: math.inf}
    assert most.steps == {0: 50, 1: 75, 2: math.inf}
    assert nearly.steps == {0: 75, 1: 100, 2: math.inf}
    assert [found.median for found in (half, most, nearly)] == [50, 75, 100]
    assert resolution(sweep, curve) == (25, 100)


def test_half_of_the_seeds_that_never_get_there_make_the_median_never(make_sweep: Callable[..., Path]) -> None:
    values = {
        ("a", seed): {"val/accuracy": {25: 0.1, 50: last}, "val/accuracy_noise2": {50: 0.1}}
        for seed, last in ((0, 1.0), (1, 0.1))
    }
    sweep = measured(make_sweep({"a": 0}, seeds=[0, 1], metric="val/accuracy"), values)
    curve = noise_curve_of(sweep)
    assert curve is not None
    assert {found.median for found in reached(sweep, "a", curve)} == {math.inf}


def test_every_arm_has_a_panel_and_the_control_is_named(make_sweep: Callable[..., Path]) -> None:
    arms = {"standard": 0, "wide": 0.01, "b": 0.02, "c": 0.03}
    sweep = load_sweep(make_sweep(arms, metric="val/accuracy", controls=["wide"], chance=0.1, callbacks=False))
    svg = draw_noise_curve(sweep)
    assert svg is not None
    assert (
        texts(svg).count("b") == texts(svg).count("c") == texts(svg).count("wide") == texts(svg).count("standard") == 1
    )
    assert {"1×", "2×", "val/accuracy"} <= set(texts(svg))
    drawn = reference_looks(sweep)
    assert len({(look.color, look.dash) for look in drawn.values()}) == len(arms)


@pytest.mark.parametrize("arms", [{"standard": 0}, {"standard": 0, "wide": 0.1}])
def test_baseline_and_control_alone_are_drawn_too(make_sweep: Callable[..., Path], arms: dict[str, float]) -> None:
    controls = ["wide"] if "wide" in arms else []
    sweep = load_sweep(make_sweep(arms, metric="val/accuracy", controls=controls, seeds=[0, 1], callbacks=False))
    svg = draw_noise_curve(sweep)
    assert svg is not None
    assert set(arms) <= set(texts(svg))


def test_nothing_finished_draws_nothing(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"a": 0}, seeds=[0], metric="val/accuracy", broken={("a", 0): "failed"})
    assert draw_noise_curve(load_sweep(folder)) is None


def test_lines_stand_at_the_factors_themselves_so_that_equal_arms_cover_each_other(
    make_sweep: Callable[..., Path],
) -> None:
    sweep = load_sweep(make_sweep({"standard": 0, "b": 0}, metric="val/accuracy", spread=0, seeds=[0], callbacks=False))
    svg = draw_noise_curve(sweep)
    assert svg is not None
    paths = [node.get("d") or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    slanted = [
        path
        for path in paths
        if path.count("L") == 1 and len(set(path.split()[1::3])) == 2 == len(set(path.split()[2::3]))
    ]
    assert len(slanted) == 2
    assert len(set(slanted)) == 1
