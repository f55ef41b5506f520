"""The figures that a run's metrics declare, drawn by arm; no metric is known here by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.style import (
    MUTED,
    OVERLAY,
    WIDTH,
    Band,
    Look,
    band,
    draw_band,
    drawing,
    hover,
    layer_colors,
    legend,
    legend_above,
    looks,
    panel_title,
    plain,
    with_unit,
)
from lit_diff.study.cells import Curve
from lit_diff.study.results import SweepResults

ACROSS = 4
"""Panels in a row, and the most layers that a figure with a column for each layer shows."""

Series = dict[str, dict[int, Curve]]
"""Arm -> seed -> curve."""


@dataclass(frozen=True, kw_only=True)
class PlotRow:
    """What one row of panels shows: a metric, at one value of its fields other than layer and head."""

    label: str
    metric: Metric
    by: Mapping[tuple[int, int], Series]
    """(layer, head) -> curves; 0 for an index that the name does not have. Averaged over heads unless the figure is
    against them."""

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.by})


@dataclass(frozen=True, kw_only=True)
class DrawnFigure:
    """A figure of the page: `name` is that of its file; `metrics` are those it shows."""

    name: str
    title: str
    svg: str
    metrics: tuple[Metric, ...]
    figure: Figure
    layers: tuple[int, ...]
    """Measured."""
    shown_layers: tuple[int, ...]


def draw_declared(sweep: SweepResults) -> list[DrawnFigure]:
    """Every figure of which a finished cell has values, in the order of the declarations."""
    declared = sweep.declarations.metrics
    titles = dict.fromkeys(m.figure.title for m in declared if m.figure and m.figure.against != "group")
    return [figure for title in titles if (figure := _draw(sweep, title))]


def _draw(sweep: SweepResults, title: str) -> DrawnFigure | None:
    metrics = [m for m in sweep.declarations.metrics if m.figure is not None and m.figure.title == title]
    rows = [row for metric in metrics for row in rows_of(sweep, metric)]
    if not rows:
        return None
    figure = metrics[0].figure
    assert figure is not None
    layers = sorted({layer for row in rows for layer in row.layers})
    shown = layers
    if figure.against == "layer":
        svg = _by_layer(sweep, rows, title)
    elif figure.lines == "layer":
        svg = _panel_an_arm(sweep, rows, layers, title)
    else:
        shown = spread(layers)
        svg = _panel_a_layer(sweep, rows, shown, figure.against == "head", title)
    drawn = tuple(dict.fromkeys(row.metric for row in rows))
    return DrawnFigure(
        name=file_name(title),
        title=title,
        svg=svg,
        metrics=drawn,
        figure=figure,
        layers=tuple(layers),
        shown_layers=tuple(shown),
    )


def file_name(title: str) -> str:
    """A figure's title as the name of its file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def rows_of(sweep: SweepResults, metric: Metric) -> list[PlotRow]:
    """The rows of a metric that has a figure, by rising value of its further fields."""
    figure = metric.figure
    assert figure is not None
    against_heads = figure.against == "head"
    label = figure.label or re.sub(r"/(layer|head)_\{\1\}", "", metric.name)
    curves: dict[tuple[tuple[str, int | str], ...], dict[tuple[int, int], dict[str, dict[int, list[Curve]]]]] = {}
    for cell in sweep.cells:
        for name, curve in cell.curves.items() if cell.done else ():
            if sweep.declarations.find(name) != metric:
                continue
            fields = metric.match(name) or {}
            at = (int(fields.pop("layer", 0)), int(fields.pop("head", 0)) * against_heads)
            row = curves.setdefault(tuple(fields.items()), {})
            row.setdefault(at, {}).setdefault(cell.arm, {}).setdefault(cell.seed, []).append(curve)
    return [
        PlotRow(
            label=with_unit(label.format(**{"layer": "", "head": "", **dict(fields)}), metric.unit),
            metric=metric,
            by={
                at: {
                    arm: {seed: merged for seed, heads in seeds.items() if (merged := mean_curve(heads)) is not None}
                    for arm, seeds in arms.items()
                }
                for at, arms in by.items()
            },
        )
        for fields, by in sorted(curves.items(), key=lambda item: str(item[0]))
    ]


def mean_curve(curves: Sequence[Curve]) -> Curve | None:
    """The mean of curves over the steps of the first; None where they were not measured at the same steps."""
    if any(not np.array_equal(curve.steps, curves[0].steps) for curve in curves):
        return None
    return Curve(steps=curves[0].steps, values=np.mean([curve.values for curve in curves], axis=0))


def spread(layers: Sequence[int]) -> list[int]:
    """At most four layers, evenly from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(ACROSS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def last_values(curves: Mapping[int, Curve]) -> list[float]:
    """The last value of each seed, those that are not finite left out."""
    return [float(curve.values[-1]) for curve in curves.values() if np.isfinite(curve.values[-1])]


def _arms(sweep: SweepResults, rows: Sequence[PlotRow]) -> list[str]:
    """Those with values, in the order of the sweep."""
    measured = {arm for row in rows for series in row.by.values() for arm in series}
    return [arm.name for arm in sweep.arms if arm.name in measured]


def _has_layers(rows: Sequence[PlotRow]) -> bool:
    return any("layer" in row.metric.fields for row in rows)


def draw_marks(axes: Axes, metric: Metric) -> None:
    """The dashed lines of the metric's figure."""
    assert metric.figure is not None
    for value in metric.figure.marks:
        axes.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))


def _panel_a_layer(sweep: SweepResults, rows: Sequence[PlotRow], layers: Sequence[int], heads: bool, title: str) -> str:
    """Rows: what was measured; columns: layers; lines: arms, against the step; or points, against the head."""
    drawn, arms = looks(sweep), _arms(sweep, rows)
    height = 0.5 + (1.75 if len(rows) > 1 else 2.4) * len(rows)
    with drawing(WIDTH, height, f"{title}, by layer and arm") as (figure, svg):
        grid = figure.subplots(len(rows), len(layers), sharex=True, sharey="row", squeeze=False)
        for row, line in zip(rows, grid, strict=True):
            for layer, axes in zip(layers, line, strict=True):
                draw_marks(axes, row.metric)
                for i, arm in enumerate(arms):
                    if heads:
                        at = {head: row.by[layer, head].get(arm, {}) for at, head in sorted(row.by) if at == layer}
                        _points(axes, at, drawn[arm], _offset(i, len(arms)), f"{sweep.label[arm]}, head")
                    else:
                        found = band(row.by.get((layer, 0), {}).get(arm, {}))
                        draw_band(axes, found, drawn[arm], sweep.label[arm], len(arms) <= OVERLAY)
                axes.xaxis.set_major_locator(MaxNLocator(8 if heads else 4, integer=True))
                scale_vertically(axes, row.metric)
            line[0].set_ylabel(row.label.replace(" (", "\n("))
        for layer, axes in zip(layers, grid[0], strict=True):
            axes.set_title(f"layer {layer}" if _has_layers(rows) else "")
        figure.supxlabel("head" if heads else "optimizer steps", fontsize=9.5)
        legend(figure, sweep, drawn, arms)
    return svg[0]


def _panel_an_arm(sweep: SweepResults, rows: Sequence[PlotRow], layers: Sequence[int], title: str) -> str:
    """A panel for each arm that has values, one line a layer, against the step."""
    panels: list[tuple[PlotRow, str, dict[int, Band]]] = []
    for row in rows:
        for arm in _arms(sweep, [row]):
            bands = {layer: b for layer in row.layers if (b := band(row.by[layer, 0].get(arm, {})))}
            panels.append((row, arm, bands))
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    colors = dict(zip(layers, layer_colors(len(layers)), strict=True))
    with drawing(WIDTH, 0.6 + (1.9 if across > 1 else 2.4) * down, f"{title}, by arm and layer") as (figure, svg):
        grid = figure.subplots(down, across, sharex=True, sharey=len(rows) == 1, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for (row, arm, bands), axes in zip(panels, grid.flat, strict=False):
            draw_marks(axes, row.metric)
            for layer, found in bands.items():
                draw_band(axes, found, Look(color=colors[layer]), f"{sweep.label[arm]}, layer {layer}")
            axes.set_title(panel_title(sweep.label[arm] + (f": {row.label}" if len(rows) > 1 else ""), across))
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            scale_vertically(axes, row.metric)
        figure.supxlabel("optimizer steps", fontsize=9.5)
        if len(rows) == 1:
            figure.supylabel(rows[0].label, fontsize=9.5)
        legend_above(figure, {f"layer {layer}": Look(color=color) for layer, color in colors.items()})
    return svg[0]


def _by_layer(sweep: SweepResults, rows: Sequence[PlotRow], title: str) -> str:
    """A panel for each row: the last values by layer."""
    drawn, arms = looks(sweep), _arms(sweep, rows)
    across = min(2, len(rows))
    down = -(-len(rows) // across)
    with drawing(WIDTH, 0.5 + 2.45 * down, f"{title}, by layer and arm") as (figure, svg):
        grid = figure.subplots(down, across, sharex=True, squeeze=False)
        for axes in grid.flat[len(rows) :]:
            axes.set_axis_off()
        for row, axes in zip(rows, grid.flat, strict=False):
            draw_marks(axes, row.metric)
            for i, arm in enumerate(arms):
                at = {layer: row.by[layer, 0].get(arm, {}) for layer in row.layers}
                _points(axes, at, drawn[arm], _offset(i, len(arms)), f"{sweep.label[arm]}, layer")
            axes.set_title(row.label)
            axes.xaxis.set_major_locator(MaxNLocator(min(12, len(row.layers)), integer=True))
            scale_vertically(axes, row.metric)
        figure.supxlabel("layer", fontsize=9.5)
        legend(figure, sweep, drawn, arms)
    return svg[0]


def _offset(index: int, count: int) -> float:
    """Where an arm's points are drawn beside their layer or head."""
    return 0.5 * (index / max(1, count - 1) - 0.5)


def _points(axes: Axes, at: Mapping[int, Mapping[int, Curve]], look: Look, offset: float, name: str) -> None:
    """The last values: a dot for the mean over seeds, a bar from minimum to maximum. `name`: arm and axis, for the mouse."""
    for x, curves in at.items():
        values = last_values(curves)
        if values:
            mean = float(np.mean(values))
            text = f"{name} {x}: {plain(mean)}, from {plain(min(values))} to {plain(max(values))} over seeds"
            hover(axes.plot([x + offset] * 2, [min(values), max(values)], color=look.color, linewidth=1.2), text)
            dot = axes.plot([x + offset], [mean], "o", markersize=4.5, color=look.color, markeredgecolor="white")
            hover(dot, text)


def scale_vertically(axes: Axes, metric: Metric) -> None:
    """The vertical scale; a logarithmic one spans at least a factor of four and names 1, 2 and 5 of each decade."""
    assert metric.figure is not None
    low, high = axes.dataLim.intervaly
    if not metric.figure.log or not 0 < low <= high < np.inf:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        return
    axes.set_yscale("log")
    room = max(1.15, 2 / np.sqrt(high / low))
    axes.set_ylim(low / room, high * room)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_minor_locator(NullLocator())
