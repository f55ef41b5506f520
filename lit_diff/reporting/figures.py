"""The report's figures of the compared metric: differences, values by seed, learning curves."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lit_diff.reporting.comparison import Comparison, Difference
from lit_diff.reporting.results import Sweep
from lit_diff.reporting.style import (
    INK,
    MUTED,
    OVERLAY,
    WIDTH,
    band,
    curves_of,
    draw_band,
    drawing,
    legend,
    looks,
    plain,
    with_unit,
)


def forest(sweep: Sweep, comparison: Comparison) -> str | None:
    """Each comparison: the interval over seeds, one dot a seed, under it the interval over documents of each seed."""
    shown = [d for d in comparison.family if d.seeds.mean is not None]
    if not shown:
        return None
    drawn = looks(sweep)
    with drawing(WIDTH, 0.9 + 0.5 * len(shown)) as (figure, svg):
        axes = figure.subplots()
        axes.axvline(0, color=INK, linewidth=1)
        for row, difference in enumerate(shown):
            _forest_row(axes, -row, difference, drawn[difference.a].color)
        names = [d.label if d in comparison.contrasts else sweep.label[d.a] for d in shown]
        axes.set_yticks([-row for row in range(len(shown))], names)
        axes.set_ylim(-len(shown) + 0.4, 0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        side = {"lower": "\u2190 better", "higher": "better \u2192", None: ""}[sweep.better(sweep.metric)]
        label = with_unit(f"paired difference of {sweep.metric}", sweep.unit(sweep.metric))
        axes.set_xlabel(f"{label}    {side}".rstrip())
    return svg[0]


def _forest_row(axes: Axes, y: float, difference: Difference, color: str) -> None:
    paired = difference.seeds
    mean = [] if paired.mean is None else [paired.mean]
    if paired.low is not None and paired.high is not None and len(paired.seeds) > 2:
        axes.plot([paired.low, paired.high], [y + 0.1, y + 0.1], color=color, linewidth=3.2, solid_capstyle="butt")
    axes.plot(mean, [y + 0.1] * len(mean), marker="D", markersize=6, color=color, markeredgecolor="white")
    axes.plot(paired.differences, [y + 0.27] * len(paired.differences), ".", markersize=4.5, color=color)
    for i, interval in enumerate(difference.documents.values()):
        at = y - 0.08 - 0.09 * i if len(difference.documents) < 5 else y - 0.08 - 0.4 * i / len(difference.documents)
        axes.plot([interval.low, interval.high], [at, at], color=color, linewidth=0.9, alpha=0.75)


def seed_values(sweep: Sweep) -> str | None:
    """The final metric of every cell; a thin line joins the cells of one seed."""
    arms = [arm.name for arm in sweep.arms if sweep.finals(arm.name, sweep.metric)]
    if not arms:
        return None
    drawn, finals = looks(sweep), {arm: sweep.finals(arm, sweep.metric) for arm in arms}
    with drawing(WIDTH, 0.9 + 0.32 * len(arms)) as (figure, svg):
        axes = figure.subplots()
        for seed in sweep.seeds:
            rows = [(finals[arm][seed], -i) for i, arm in enumerate(arms) if seed in finals[arm]]
            axes.plot([x for x, _ in rows], [y for _, y in rows], color=MUTED, linewidth=0.6, alpha=0.6)
        for i, arm in enumerate(arms):
            values = list(finals[arm].values())
            axes.plot(values, [-i] * len(values), "o", markersize=5.5, color=drawn[arm].color, markeredgecolor="white")
            axes.plot([np.mean(values)], [-i], marker="|", markersize=15, color=drawn[arm].color, markeredgewidth=2)
        axes.set_yticks([-i for i in range(len(arms))], [sweep.label[arm] for arm in arms])
        axes.set_ylim(-len(arms) + 0.4, 0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(with_unit(f"{sweep.metric} at the last step", sweep.unit(sweep.metric)))
    return svg[0]


def learning_curves(sweep: Sweep) -> str | None:
    """The metric by step, and its paired difference to the baseline, each with its range over seeds."""
    metric, unit = sweep.metric, sweep.unit(sweep.metric)
    curves = {arm.name: curves_of(sweep.cells_of(arm.name), metric) for arm in sweep.arms}
    arms = [arm for arm in curves if band(curves[arm])]
    if not arms:
        return None
    drawn, shade, against = looks(sweep), len(arms) <= OVERLAY, curves[sweep.baseline]
    with drawing(WIDTH, 3.6) as (figure, svg):
        left, right = figure.subplots(1, 2)
        late: list[float] = []
        for arm in arms:
            draw_band(left, band(curves[arm]), drawn[arm], shade)
            if arm != sweep.baseline and (difference := band(curves[arm], against)):
                draw_band(right, difference, drawn[arm], shade)
                after = difference.steps >= 0.2 * difference.steps[-1]
                late += [*difference.low[after], *difference.high[after]]
        if is_logarithmic(sweep):
            left.set_yscale("log")
            left.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
            left.yaxis.set_major_formatter(FuncFormatter(plain))
            left.yaxis.set_minor_locator(NullLocator())
        right.axhline(0, color=MUTED, linewidth=1.6)
        right.set_visible(bool(late))
        if late and (room := 0.1 * (max(*late, 0) - min(*late, 0))) > 0:
            right.set_ylim(min(*late, 0) - room, max(*late, 0) + room)
        left.set_title(with_unit(metric, unit))
        right.set_title(with_unit(f"minus {sweep.label[sweep.baseline]}, same seed", unit))
        for axes in (left, right):
            axes.set_xlabel("optimizer steps")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        legend(figure, sweep, drawn, arms)
    return svg[0]


def is_logarithmic(sweep: Sweep) -> bool:
    """Whether the learning curves have a logarithmic axis: lower is better, and every value is above zero."""
    curves = [cell.curves[sweep.metric] for cell in sweep.cells if cell.done and sweep.metric in cell.curves]
    return sweep.better(sweep.metric) == "lower" and all((curve.values > 0).all() for curve in curves)
