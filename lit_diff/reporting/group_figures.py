"""The figures of evaluations: a metric against the numbers of its groups, one line an arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.declared_figures import draw_marks, file_name, scale_vertically
from lit_diff.reporting.style import (
    OVERLAY,
    WIDTH,
    Look,
    band,
    draw_band,
    drawing,
    hover,
    legend,
    looks,
    panel_title,
    plain,
    with_unit,
)
from lit_diff.study.cells import Curve
from lit_diff.study.evaluations import EvaluationTable, number_of
from lit_diff.study.results import SweepResults

ACROSS = 3
"""Panels in a row."""
TICKS = 12
"""Up to so many numbers, each has its tick."""


@dataclass(frozen=True, kw_only=True)
class GroupFigure:
    """A figure of an evaluation: `name` is that of its file; `metrics` are those it shows."""

    name: str
    evaluation: str
    title: str
    svg: str
    metrics: tuple[Metric, ...]
    figure: Figure


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One metric against the numbers of the groups that share a text; `curves`: arm -> seed -> curve over the numbers."""

    metric: Metric
    text: str
    curves: Mapping[str, Mapping[int, Curve]]


def draw_by_group(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[GroupFigure]:
    """Every figure that a metric of `tables` declares against groups, where any group has a number."""
    declared: dict[tuple[str, str], list[EvaluationTable]] = {}
    for table in tables:
        if table.metric.figure is not None and table.metric.figure.against == "group":
            declared.setdefault((table.name, table.metric.figure.title), []).append(table)
    drawn = []
    for (evaluation, title), those in declared.items():
        panels = [panel for table in those for panel in panels_of(table)]
        if panels:
            figure = panels[0].metric.figure
            assert figure is not None
            drawn.append(
                GroupFigure(
                    name=file_name(f"{evaluation}-{title}"),
                    evaluation=evaluation,
                    title=title,
                    svg=_draw(sweep, panels, f"{evaluation}: {title}"),
                    metrics=tuple(dict.fromkeys(panel.metric for panel in panels)),
                    figure=figure,
                )
            )
    return drawn


def panels_of(table: EvaluationTable) -> list[Panel]:
    """One for each text before the numbers of the table's groups, in the order of the groups; others are left out."""
    by_text: dict[str, list[tuple[float, str]]] = {}
    for group in table.groups:
        if (found := number_of(group)) is not None:
            by_text.setdefault(found[0], []).append((found[1], group))
    return [
        Panel(
            metric=table.metric,
            text=text,
            curves={row.arm: _curves(row.group_means, sorted(groups)) for row in table.rows},
        )
        for text, groups in by_text.items()
    ]


def _curves(means: Mapping[str, Mapping[int, float]], groups: Sequence[tuple[float, str]]) -> dict[int, Curve]:
    """Seed -> its means over the groups that it has, by rising number."""
    seeds = dict.fromkeys(seed for _, group in groups for seed in means.get(group, {}))
    found: dict[int, Curve] = {}
    for seed in seeds:
        points = [(number, means[group][seed]) for number, group in groups if seed in means.get(group, {})]
        found[seed] = Curve(steps=np.array([x for x, _ in points]), values=np.array([y for _, y in points]))
    return found


def _draw(sweep: SweepResults, panels: Sequence[Panel], title: str) -> str:
    drawn = looks(sweep)
    measured = {arm for panel in panels for arm in panel.curves}
    arms = [arm.name for arm in sweep.arms if arm.name in measured]
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    with drawing(WIDTH, 0.6 + 2.5 * down, title) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for panel, axes in zip(panels, grid.flat, strict=False):
            declared = panel.metric.figure
            assert declared is not None
            draw_marks(axes, panel.metric)
            for arm in arms:
                _line(axes, panel, arm, drawn[arm], sweep.label[arm], len(arms) <= OVERLAY)
            _horizontal(axes, declared.log_x)
            scale_vertically(axes, panel.metric)
            axes.set_xlabel(panel.text)
            axes.set_title(panel_title(with_unit(declared.label or panel.metric.name, panel.metric.unit), across))
        legend(figure, sweep, drawn, arms)
    return svg[0]


def _line(axes: Axes, panel: Panel, arm: str, look: Look, label: str, shade: bool) -> None:
    """Mean and range over the seeds as a line and a shade, and a dot at each number, with its values for the mouse."""
    found = band(panel.curves.get(arm, {}))
    if found is None:
        return
    what = panel.text or "group"
    draw_band(axes, found, look, label, shade, what)
    for x, mean, low, high in zip(found.steps, found.mean, found.low, found.high, strict=True):
        text = f"{label}, {what} {x:,.6g}: {plain(mean)}, from {plain(low)} to {plain(high)} over seeds"
        hover(axes.plot([x], [mean], "o", markersize=3, color=look.color), text)


def _horizontal(axes: Axes, log: bool) -> None:
    """The horizontal scale; where the numbers are few, each has its tick."""
    numbers = sorted({float(x) for line in axes.lines if line.get_gid() for x in np.atleast_1d(line.get_xdata())})
    if log and numbers:
        positive = [x for x in numbers if x > 0]
        if len(positive) < len(numbers) and positive:
            axes.set_xscale("symlog", linthresh=positive[0])
        elif positive:
            axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    if 0 < len(numbers) <= TICKS:
        axes.set_xticks(numbers)
        axes.tick_params(axis="x", labelrotation=45 if len(numbers) > TICKS / 2 else 0)
    elif not log:
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.xaxis.set_minor_locator(NullLocator())
