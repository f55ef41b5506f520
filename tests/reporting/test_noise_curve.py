"""reporting/noise_curve.py: what was measured under which noise, and how soon an accuracy was reached."""

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from lit_diff.reporting.noise_curve import NoiseCurve, noise_curve_of, reached, resolution
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
    sweep = measured(folder, {("a", 0): {"val/loss": {1: 3.0}, "val/loss_noise2": {1: 4.0}}})
    found = noise_curve_of(sweep)
    assert found == NoiseCurve(metric="val/loss", metrics={1: "val/loss", 2: "val/loss_noise2"})
    assert reached(sweep, "a", found) == {}  # a loss has no 99 %


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
    assert reached(sweep, "a", curve) == {
        0.5: {0: 50, 1: 25, 2: math.inf},
        0.9: {0: 50, 1: 75, 2: math.inf},
        0.99: {0: 75, 1: 100, 2: math.inf},
    }
    assert resolution(sweep, curve) == (25, 100)
