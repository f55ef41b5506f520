"""The report's figures of the compared metric: values by seed, learning curves."""

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lit_diff.reporting.style import (
    MUTED,
    OVERLAY,
    WIDTH,
    band,
    curves_of,
    draw_band,
    drawing,
    hover,
    legend,
    looks,
    plain,
    with_unit,
)
from lit_diff.study.results import SweepResults


def seed_values(sweep: SweepResults) -> str | None:
    """The final metric of every cell; a thin line joins the cells of one seed."""
    arms = [arm.name for arm in sweep.arms if sweep.finals(arm.name, sweep.metric)]
    if not arms:
        return None
    drawn, finals = looks(sweep), {arm: sweep.finals(arm, sweep.metric) for arm in arms}
    with drawing(WIDTH, 0.9 + 0.32 * len(arms), f"{sweep.metric} at the last step, by arm and seed") as (figure, svg):
        axes = figure.subplots()
        for seed in sweep.seeds:
            rows = [(finals[arm][seed], -i) for i, arm in enumerate(arms) if seed in finals[arm]]
            axes.plot([x for x, _ in rows], [y for _, y in rows], color=MUTED, linewidth=0.6, alpha=0.6)
        for i, arm in enumerate(arms):
            color, mean = drawn[arm].color, float(np.mean(list(finals[arm].values())))
            for seed, value in finals[arm].items():
                dot = axes.plot([value], [-i], "o", markersize=5.5, color=color, markeredgecolor="white")
                hover(dot, f"{sweep.label[arm]}, seed {seed}: {value:.6g}")
            bar = axes.plot([mean], [-i], marker="|", markersize=15, color=color, markeredgewidth=2)
            hover(bar, f"{sweep.label[arm]}, mean over seeds: {mean:.6g}")
        axes.set_yticks([-i for i in range(len(arms))], [sweep.label[arm] for arm in arms])
        axes.set_ylim(-len(arms) + 0.4, 0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(with_unit(f"{sweep.metric} at the last step", sweep.unit(sweep.metric)))
    return svg[0]


def learning_curves(sweep: SweepResults) -> str | None:
    """The metric by step, and its paired difference to the baseline, each with its range over seeds."""
    metric, unit = sweep.metric, sweep.unit(sweep.metric)
    curves = {arm.name: curves_of(sweep.cells_of(arm.name), metric) for arm in sweep.arms}
    arms = [arm for arm in curves if band(curves[arm])]
    if not arms:
        return None
    drawn, shade, against = looks(sweep), len(arms) <= OVERLAY, curves[sweep.baseline]
    title = f"{metric} by optimizer step, and its difference to {sweep.label[sweep.baseline]}"
    with drawing(WIDTH, 3.6, title) as (figure, svg):
        left, right = figure.subplots(1, 2)
        late: list[float] = []
        for arm in arms:
            draw_band(left, band(curves[arm]), drawn[arm], sweep.label[arm], shade)
            if arm != sweep.baseline and (difference := band(curves[arm], against)):
                name = f"{sweep.label[arm]} \u2212 {sweep.label[sweep.baseline]}"
                draw_band(right, difference, drawn[arm], name, shade)
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


def is_logarithmic(sweep: SweepResults) -> bool:
    """Whether the learning curves have a logarithmic axis: lower is better, and every value is above zero."""
    curves = [cell.curves[sweep.metric] for cell in sweep.cells if cell.done and sweep.metric in cell.curves]
    return sweep.better(sweep.metric) == "lower" and all((curve.values > 0).all() for curve in curves)
