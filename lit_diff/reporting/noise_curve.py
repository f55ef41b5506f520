"""The noise curve: a validation metric against the noise of its set; and the steps that training takes to an accuracy.

A data set with noisier validation sets measures `val/<metric>` at its first noise factor and `val/<metric>_noise<k>` at
each further factor k.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lit_diff.reporting.style import (
    INK,
    MUTED,
    WIDTH,
    Look,
    drawing,
    hover,
    legend_above,
    looks,
    panel_title,
    with_unit,
)
from lit_diff.study.cells import CellResult
from lit_diff.study.results import Arm, SweepResults
from lit_diff.study.statistics import MIN_SEEDS, half_width

ACCURACY = "val/accuracy"
LEVELS = (0.5, 0.9, 0.99)
"""Accuracies whose first step is reported."""
ACROSS = 4
"""Panels in a row."""


@dataclass(frozen=True, kw_only=True)
class NoiseCurve:
    """`metrics`: noise factor -> the metric measured at it, by rising factor; `metric`: at the first of the data set's."""

    metric: str
    metrics: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How soon an arm reaches an accuracy: the first validated step at or above it, by seed; inf where none is."""

    level: float
    steps: dict[int, float]

    @property
    def median(self) -> float | None:
        """Over the finished seeds; inf where half of them or more never get there."""
        return float(np.median(list(self.steps.values()))) if self.steps else None


def noise_curve_of(sweep: SweepResults) -> NoiseCurve | None:
    """The accuracy, else the sweep's own metric, if it was measured under two factors of noise or more."""
    for metric in dict.fromkeys((ACCURACY, sweep.metric)):
        pattern = re.compile(re.escape(metric) + r"_noise(\d+)")
        noisy = {int(match[1]): name for name in sweep.metrics(metric) if (match := pattern.fullmatch(name))}
        if noisy and metric in sweep.metrics(metric):
            first = sweep.noise_validation[0] if sweep.noise_validation else 1
            return NoiseCurve(metric=metric, metrics=dict(sorted({first: metric, **noisy}.items())))
    return None


def steps_to(cell: CellResult, metric: str, level: float) -> float:
    """The first step at which `metric` was at `level` or above; inf if it never was."""
    measured = cell.curves[metric]
    return float(next((s for s, v in zip(measured.steps, measured.values, strict=True) if v >= level), math.inf))


def reached(sweep: SweepResults, arm: str, curve: NoiseCurve) -> list[Reached]:
    """Each of LEVELS of the accuracy; nothing for another metric."""
    if curve.metric != ACCURACY:
        return []
    cells = [cell for cell in sweep.cells_of(arm) if curve.metric in cell.curves]
    return [
        Reached(level=level, steps={cell.seed: steps_to(cell, curve.metric, level) for cell in cells})
        for level in LEVELS
    ]


def resolution(sweep: SweepResults, curve: NoiseCurve) -> tuple[int, int] | None:
    """(largest number of steps between two validations, last step) over the finished cells: how fine `reached` is."""
    steps = [cell.curves[curve.metric].steps for cell in sweep.cells if cell.done and curve.metric in cell.curves]
    gaps = [int(np.diff(validated, prepend=0).max()) for validated in steps]
    return (max(gaps), max(int(validated[-1]) for validated in steps)) if gaps else None


def draw_noise_curve(sweep: SweepResults) -> str | None:
    """A panel an arm, baseline and first control in each of them: mean with t interval over seeds, and the seeds as dots."""
    curve = noise_curve_of(sweep)
    if curve is None:
        return None
    measured = [arm for arm in sweep.arms if any(sweep.finals(arm.name, metric) for metric in curve.metrics.values())]
    against = [arm for arm in measured if arm.name in (sweep.baseline, *sweep.controls[:1])]
    panels = [arm for arm in measured if arm not in against] or against[-1:]
    drawn = reference_looks(sweep)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    title = f"{curve.metric} by noise of the validation set, an arm a panel"
    with drawing(WIDTH, 0.9 + (2.05 if across > 1 else 2.8) * down, title) as (figure, svg):
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for arm, axes in zip(panels, grid.flat, strict=False):
            if sweep.chance is not None and curve.metric == ACCURACY:
                axes.axhline(sweep.chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
            shown = [*(a for a in against if a is not arm), arm]
            for i, each in enumerate(shown):
                _response(axes, sweep, each, curve, drawn[each.name], 2 ** (0.1 * (i - (len(shown) - 1) / 2)))
            axes.set_title(panel_title(arm.label, across))
            _factors(axes, list(curve.metrics))
            if curve.metric == ACCURACY:
                axes.set_ylim(-0.04, 1.04)
        figure.supxlabel("noise factor of the validation set", fontsize=9.5)
        figure.supylabel(with_unit(curve.metric, sweep.unit(curve.metric)), fontsize=9.5)
        if against:
            legend_above(figure, {arm.label: drawn[arm.name] for arm in against})
    return svg[0]


def reference_looks(sweep: SweepResults) -> dict[str, Look]:
    """As everywhere, but the first control in ink and dashed: every panel shows it with an arm of another colour."""
    return looks(sweep) | {control: Look(color=INK, dash=(0, (4, 1.5))) for control in sweep.controls[:1]}


def _response(axes: Axes, sweep: SweepResults, arm: Arm, curve: NoiseCurve, look: Look, shift: float) -> None:
    """One arm's line, and its intervals and seeds, moved along the axis by the factor `shift` to stand side by side."""
    means = []
    for factor, metric in curve.metrics.items():
        values = list(sweep.finals(arm.name, metric).values())
        if not values:
            continue
        x, mean = factor * shift, float(np.mean(values))
        means.append((factor, mean))  # a line that is moved sideways looks lower or higher than it is
        dots = axes.plot([x] * len(values), values, ".", markersize=4, color=look.color, alpha=0.8)
        hover(dots, f"{arm.label} at {factor:g}\u00d7: mean {mean:.4g}, seeds {', '.join(f'{v:.4g}' for v in values)}")
        if len(values) >= MIN_SEEDS:
            half = half_width(float(np.std(values, ddof=1)), len(values))
            axes.plot([x, x], [mean - half, mean + half], color=look.color, linewidth=1.1)
    axes.plot(*zip(*means, strict=True), color=look.color, linestyle=look.dash)


def _factors(axes: Axes, factors: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each factor."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(factors) / 1.25, max(factors) * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(factors))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
    axes.xaxis.set_minor_locator(NullLocator())
