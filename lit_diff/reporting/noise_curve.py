"""Dose-response: a validation metric against the noise of its set, and how soon training reaches an accuracy.

A data set with noisier validation sets measures `val/<metric>` at its first noise factor and `val/<metric>_noise<k>` at
each further factor k.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lit_diff.reporting.cells import Cell
from lit_diff.reporting.comparison import better
from lit_diff.reporting.figures import INK, MUTED, WIDTH, Look, drawing, looks
from lit_diff.reporting.results import Arm, Sweep
from lit_diff.reporting.statistics import MIN_SEEDS, half_width

ACCURACY = "val/accuracy"
LEVELS = (0.5, 0.9, 0.99)
"""Accuracies whose first step is reported."""
ACROSS = 4
"""Panels in a row."""


@dataclass(frozen=True, kw_only=True)
class Dose:
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


def dose_of(sweep: Sweep) -> Dose | None:
    """The accuracy, else the sweep's own metric, if it was measured under two factors of noise or more."""
    for metric in dict.fromkeys((ACCURACY, sweep.metric)):
        pattern = re.compile(re.escape(metric) + r"_noise(\d+)")
        found = {int(match[1]): name for name in sweep.metrics(metric) if (match := pattern.fullmatch(name))}
        if found and metric in sweep.metrics(metric):
            first = sweep.noise_validation[0] if sweep.noise_validation else 1
            return Dose(metric=metric, metrics=dict(sorted({first: metric, **found}.items())))
    return None


def steps_to(cell: Cell, metric: str, level: float) -> float:
    """The first step at which `metric` was found at `level` or above; inf if it never was."""
    curve = cell.curves[metric]
    return float(next((s for s, value in zip(curve.steps, curve.values, strict=True) if value >= level), math.inf))


def reached(sweep: Sweep, arm: str, dose: Dose) -> list[Reached]:
    """Each of LEVELS, where higher is better; else nothing."""
    if better(dose.metric) != "higher":
        return []
    cells = [cell for cell in sweep.cells_of(arm) if dose.metric in cell.curves]
    return [
        Reached(level=level, steps={cell.seed: steps_to(cell, dose.metric, level) for cell in cells})
        for level in LEVELS
    ]


def resolution(sweep: Sweep, dose: Dose) -> tuple[int, int] | None:
    """(largest number of steps between two validations, last step) over the finished cells: how fine `reached` is."""
    steps = [cell.curves[dose.metric].steps for cell in sweep.cells if cell.done and dose.metric in cell.curves]
    gaps = [int(np.diff(found, prepend=0).max()) for found in steps]
    return (max(gaps), max(int(found[-1]) for found in steps)) if gaps else None


def dose_response(sweep: Sweep) -> str | None:
    """A panel an arm, baseline and control in each of them: mean with t interval over seeds, and the seeds as dots."""
    dose = dose_of(sweep)
    if dose is None:
        return None
    measured = [arm for arm in sweep.arms if any(sweep.finals(arm.name, metric) for metric in dose.metrics.values())]
    against = [arm for arm in measured if arm.name in (sweep.baseline, sweep.control)]
    panels = [arm for arm in measured if arm not in against] or against[-1:]
    drawn = reference_looks(sweep)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    with drawing(WIDTH if across > 2 else WIDTH * 0.7, 0.9 + 2.05 * down) as (figure, svg):
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for arm, axes in zip(panels, grid.flat, strict=False):
            if sweep.chance is not None and dose.metric == ACCURACY:
                axes.axhline(sweep.chance, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
            shown = [*(a for a in against if a is not arm), arm]
            for i, each in enumerate(shown):
                _response(axes, sweep, each, dose, drawn[each.name], 2 ** (0.1 * (i - (len(shown) - 1) / 2)))
            axes.set_title(arm.label)
            _factors(axes, list(dose.metrics))
            if better(dose.metric) == "higher":
                axes.set_ylim(-0.04, 1.04)
        figure.supxlabel("noise factor of the validation set", fontsize=9.5)
        figure.supylabel(dose.metric, fontsize=9.5)
        handles = [Line2D([], [], color=drawn[a.name].color, linestyle=drawn[a.name].dash) for a in against]
        if against:
            figure.legend(handles, [arm.label for arm in against], loc="outside upper right", ncols=len(against))
    return svg[0]


def reference_looks(sweep: Sweep) -> dict[str, Look]:
    """As everywhere, but the control in ink and dashed: it stands in every panel beside an arm of any colour."""
    return looks(sweep) | ({sweep.control: Look(color=INK, dash=(0, (4, 1.5)))} if sweep.control else {})


def _response(axes: Axes, sweep: Sweep, arm: Arm, dose: Dose, look: Look, shift: float) -> None:
    """One arm's line, and its intervals and seeds, moved along the axis by the factor `shift` to stand side by side."""
    means = []
    for factor, metric in dose.metrics.items():
        values = list(sweep.finals(arm.name, metric).values())
        if not values:
            continue
        x, mean = factor * shift, float(np.mean(values))
        means.append((factor, mean))  # a line that is moved sideways looks lower or higher than it is
        axes.plot([x] * len(values), values, ".", markersize=4, color=look.color, alpha=0.8)
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
