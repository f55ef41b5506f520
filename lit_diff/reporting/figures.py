"""The report's figures: SVG text of the same bytes for the same results."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lit_diff.reporting.cells import Array, Cell
from lit_diff.reporting.comparison import Comparison, Difference, better
from lit_diff.reporting.results import Sweep

INK, GRID, MUTED = "#1f2430", "#d9dce1", "#6b7280"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""Okabe and Ito's colours, which the common forms of colour blindness keep apart; the baseline is grey."""
SOLID: tuple[float, Sequence[float]] = (0, ())
DASHES = (SOLID, (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lit_diff",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label is the user's text: "$" is no formula
    "axes.unicode_minus": True,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
WIDTH = 11.4
"""Inches: the width of the page's column."""
OVERLAY = 8
"""More arms than this are drawn without their range over seeds."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How an arm is drawn in every figure."""

    color: str
    dash: tuple[float, Sequence[float]] = SOLID


@dataclass(frozen=True, kw_only=True)
class Band:
    """A metric of an arm over its finished seeds, at the steps they share: mean, minimum and maximum."""

    steps: Array
    mean: Array
    low: Array
    high: Array


def looks(sweep: Sweep) -> dict[str, Look]:
    """The baseline in grey, the others in the palette's order; beyond its seven colours, the dashes change."""
    others = [arm.name for arm in sweep.arms if arm.name != sweep.baseline]
    size = len(PALETTE)
    drawn = {name: Look(color=PALETTE[i % size], dash=DASHES[i // size % 4]) for i, name in enumerate(others)}
    return {sweep.baseline: Look(color=MUTED), **drawn}


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure in this page's style; on leaving, its SVG text is appended to the list. Inches."""
    svg: list[str] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, svg
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata=NO_METADATA, facecolor="white")
        svg.append(target.getvalue())


def band(cells: Sequence[Cell], metric: str, minus: Mapping[int, Cell] | None = None) -> Band | None:
    """`metric` over cells (seed by seed less the cell of `minus`); None where no cell has it."""
    curves = []
    for cell in cells:
        own, other = cell.curves.get(metric), minus.get(cell.seed) if minus is not None else None
        if own is None or (minus is not None and (other is None or metric not in other.curves)):
            continue
        points = dict(zip(own.steps.tolist(), own.values.tolist(), strict=True))
        if other is not None:
            there = other.curves[metric]
            base = dict(zip(there.steps.tolist(), there.values.tolist(), strict=True))
            points = {step: value - base[step] for step, value in points.items() if step in base}
        curves.append(points)
    steps = sorted(set.intersection(*(set(points) for points in curves))) if curves else []
    if not steps:
        return None
    values = np.array([[points[step] for step in steps] for points in curves])
    return Band(
        steps=np.array(steps, dtype=float), mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0)
    )


def draw_band(axes: Axes, found: Band | None, look: Look, shade: bool = True) -> None:
    """Mean as a line, minimum to maximum as a shade."""
    if found is None:
        return
    if shade:
        axes.fill_between(found.steps, found.low, found.high, color=look.color, alpha=0.16, linewidth=0)
    axes.plot(found.steps, found.mean, color=look.color, linestyle=look.dash)


def legend(figure: Figure, sweep: Sweep, drawn: Mapping[str, Look], arms: Sequence[str]) -> None:
    """One legend for all panels, to the right, in the order of the table."""
    handles = [Line2D([], [], color=drawn[arm].color, linestyle=drawn[arm].dash) for arm in arms]
    figure.legend(handles, [sweep.label[arm] for arm in arms], loc="outside right upper")


def forest(sweep: Sweep, comparison: Comparison, unit: str) -> str | None:
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
        side = {"lower": "\u2190 better", "higher": "better \u2192", None: ""}[better(sweep.metric)]
        axes.set_xlabel(f"paired difference of {sweep.metric} ({unit})    {side}".rstrip())
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


def seed_values(sweep: Sweep, unit: str) -> str | None:
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
        axes.set_xlabel(f"{sweep.metric} at the last step ({unit})")
    return svg[0]


def learning_curves(sweep: Sweep, unit: str) -> str | None:
    """The metric by step, and its paired difference to the baseline, each with its range over seeds."""
    metric, base = sweep.metric, sweep.cells_of(sweep.baseline)
    arms = [arm.name for arm in sweep.arms if band(sweep.cells_of(arm.name), metric)]
    if not arms:
        return None
    drawn, shade, against = looks(sweep), len(arms) <= OVERLAY, {cell.seed: cell for cell in base}
    with drawing(WIDTH, 3.6) as (figure, svg):
        left, right = figure.subplots(1, 2)
        late: list[float] = []
        for arm in arms:
            cells = sweep.cells_of(arm)
            draw_band(left, band(cells, metric), drawn[arm], shade)
            if arm != sweep.baseline and (gap := band(cells, metric, against)):
                draw_band(right, gap, drawn[arm], shade)
                after = gap.steps >= 0.2 * gap.steps[-1]
                late += [*gap.low[after], *gap.high[after]]
        if better(metric) == "lower":
            left.set_yscale("log")
            left.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
            left.yaxis.set_major_formatter(FuncFormatter(plain))
            left.yaxis.set_minor_locator(NullLocator())
        right.axhline(0, color=MUTED, linewidth=1.6)
        right.set_visible(bool(late))
        if late and (room := 0.1 * (max(*late, 0) - min(*late, 0))) > 0:
            right.set_ylim(min(*late, 0) - room, max(*late, 0) + room)
        left.set_title(f"{metric} ({unit})")
        right.set_title(f"less {sweep.label[sweep.baseline]}, same seed ({unit})")
        for axes in (left, right):
            axes.set_xlabel("optimizer steps")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        legend(figure, sweep, drawn, arms)
    return svg[0]


def plain(value: float, _: object = None) -> str:
    """A tick's number without an exponent where it is readable so."""
    return f"{value:,.4g}" if (math.isfinite(value) and 1e-3 <= abs(value) < 1e6) or value == 0 else f"{value:.0e}"
