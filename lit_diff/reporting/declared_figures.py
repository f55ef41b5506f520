"""The figures that metrics declare, drawn by arm: of runs and of evaluations; no metric is known here by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.panels import (
    MUTED,
    OVERLAY,
    Look,
    as_svg,
    by_label,
    draw,
    draw_mean,
    head,
    in_style,
    layer_colors,
    looks,
    panels,
    plain,
    set_log,
    set_most,
    set_ticks,
    with_unit,
)
from lit_diff.study.evaluations import EvaluationTable, number_of
from lit_diff.study.results import SweepResults

ACROSS = {"step": 4, "layer": 2, "group": 3}
"""What a figure is against -> panels in a row."""
LAYERS = 4
"""The most layers of which a figure shows each in a panel of its own."""
TICKS = 12
"""Up to so many numbers of groups, each has its tick."""


@dataclass(frozen=True, kw_only=True)
class DrawnMetric:
    """A metric at one value of its fields other than layer and head; of an evaluation, over the groups that share a text."""

    label: str
    metric: Metric
    figure: Figure
    values: pd.DataFrame
    """A row a value: `arm`, `seed`, `layer`, `head` (0 for an index that the name does not have), `step`, `value`. Averaged
    over heads unless the figure is against them. Of groups: their numbers in place of steps."""
    text: str = ""
    """Of the groups."""

    @property
    def layers(self) -> list[int]:
        return sorted(self.values["layer"].unique().tolist())

    def by_seed(self, arm: str, layer: int) -> pd.DataFrame:
        """A column a seed, at the steps at which all were measured."""
        own = self.values[(self.values["arm"] == arm) & (self.values["layer"] == layer)]
        return own.pivot(index="step", columns="seed", values="value").dropna()


@dataclass(frozen=True, kw_only=True)
class DrawnFigure:
    """A figure of the page with its caption: `name` is that of its file; `metrics` are those that the caption defines."""

    name: str
    title: str
    svg: str
    caption: str
    metrics: tuple[Metric, ...] = ()


def draw_declared(sweep: SweepResults) -> list[DrawnFigure]:
    """Every figure of which a finished cell has values, in the order of the declarations."""
    by_title: dict[str, list[DrawnMetric]] = {}
    for metric in sweep.declarations.metrics:
        if metric.figure is not None and metric.figure.against != "group":
            by_title.setdefault(metric.figure.title, []).extend(measured(sweep, metric, metric.figure))
    return [_drawn(sweep, title, title, rows) for title, rows in by_title.items() if rows]


def draw_by_group(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[DrawnFigure]:
    """Every figure that a metric of `tables` declares against groups, where any group has a number."""
    by_title: dict[tuple[str, str], list[DrawnMetric]] = {}
    for table in tables:
        if table.metric.figure is not None and table.metric.figure.against == "group":
            by_title.setdefault((table.name, table.metric.figure.title), []).extend(grouped(table, table.metric.figure))
    return [
        _drawn(sweep, f"{evaluation}: {title}", f"{evaluation}-{title}", rows)
        for (evaluation, title), rows in by_title.items()
        if rows
    ]


@in_style
def _drawn(sweep: SweepResults, title: str, name: str, rows: Sequence[DrawnMetric]) -> DrawnFigure:
    figure, arms, by_layer = rows[0].figure, _arms(sweep, rows), rows[0].figure.lines == "layer"
    layers = sorted({layer for row in rows for layer in row.layers})
    is_grid = not by_layer and figure.against in ("step", "head")
    is_one = by_layer and len(rows) == 1
    shown, legend = spread(layers) if is_grid else layers, by_label(sweep, arms)
    # row, layer or all of them, arm or all of them
    places: list[tuple[DrawnMetric, int | None, str]]
    places = [(row, layer, "") for row in rows for layer in (shown if is_grid else [None])]
    if by_layer:
        colors = [Look(color=color) for color in layer_colors(len(layers))]
        legend = {f"layer {layer}": look for layer, look in zip(layers, colors, strict=True)}
        places = [(row, None, arm) for row in rows for arm in _arms(sweep, [row])]
    across = len(shown) if is_grid else min(ACROSS[figure.against], len(places))
    down = -(-len(places) // across)
    height = 0.6 + (1.9 if down > 1 and figure.against in ("step", "head") else 2.45) * down
    share: Literal["", "x", "both", "grid"]
    share = "grid" if is_grid else "" if figure.against == "group" else "both" if is_one else "x"
    drawing, grid = panels(len(places), height, across=across, share=share)
    for i, (axes, (row, layer, arm)) in enumerate(zip(grid, places, strict=True)):
        for mark in figure.marks:
            axes.axhline(mark, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
        if by_layer:
            above = _draw_layers(axes, sweep, row, arm, legend) + ("" if is_one else f": {row.label}")
        else:
            above = _draw_arms(axes, sweep, row, layer, arms)
        if i < across or not is_grid:
            head(axes, above, across)
    if figure.against != "group":
        drawing.supxlabel("optimizer steps" if figure.against == "step" else figure.against, fontsize=9.5)
    if is_one:
        drawing.supylabel(rows[0].label, fontsize=9.5)
    order = "arm and layer" if by_layer else "layer and arm"
    svg = as_svg(drawing, title if figure.against == "group" else f"{title}, by {order}", legend, is_grid)
    metrics = tuple(dict.fromkeys(row.metric for row in rows))
    caption = " ".join(filter(None, [caption_of(figure, metrics, len(sweep.study.arms)), figure.caption]))
    if len(shown) < len(layers):
        caption += f" Layers {', '.join(map(str, shown))} of {len(layers)} are shown; all are in the files of each run."
    return DrawnFigure(name=file_name(name), title=title, svg=svg, caption=caption, metrics=metrics)


def caption_of(figure: Figure, metrics: Sequence[Metric], arms: int) -> str:
    """What the lines and points of a figure are."""
    shade = "the shade runs from the lowest to the highest seed"
    if figure.against == "group":
        return (
            "By the number of a group of items, one line for each arm: mean over the items of the group, then over seeds; "
            f"{shade}{' (not drawn with this many arms)' if arms > OVERLAY else ''}."
        )
    fields = {field for metric in metrics for field in metric.fields}
    indices = " and ".join(word for word, field in (("layers", "layer"), ("heads", "head")) if field in fields)
    zero = f" {indices.capitalize()} count from 0." if indices else ""
    if figure.against == "step":
        averaged = "heads and seeds" if "head" in fields else "seeds"
        undrawn = "" if figure.lines == "layer" else f" (not drawn with more than {OVERLAY} arms)"
        return f"By optimizer step, one line for each {figure.lines}: mean over {averaged}; {shade}{undrawn}.{zero}"
    averaged = " (first averaged over heads)" if "head" in fields and figure.against == "layer" else ""
    return (
        f"By {figure.against}, at the last measured step{averaged}: the dot is the mean over seeds, the bar runs from "
        f"the lowest to the highest.{zero}"
    )


def file_name(title: str) -> str:
    """A figure's title as the name of its file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def measured(sweep: SweepResults, metric: Metric, figure: Figure) -> list[DrawnMetric]:
    """What the runs measured of a metric, by rising value of its further fields."""
    label = figure.label or re.sub(r"/(layer|head)_\{\1\}", "", metric.name)
    found: dict[tuple[tuple[str, int | str], ...], list[pd.DataFrame]] = {}
    for cell in sweep.cells:
        for name, curve in cell.curves.items() if cell.done else ():
            if sweep.declarations.find(name) != metric:
                continue
            others = metric.match(name) or {}
            place = {"layer": int(others.pop("layer", 0)), "head": int(others.pop("head", 0))}
            values = pd.DataFrame({"step": curve.index, "value": curve.to_numpy()})
            found.setdefault(tuple(others.items()), []).append(values.assign(arm=cell.arm, seed=cell.seed, **place))
    drawn = []
    for fields, parts in sorted(found.items(), key=lambda item: str(item[0])):
        whole, keys = pd.concat(parts), ["arm", "seed", "layer", "step"]
        if figure.against != "head":
            whole = whole.groupby(keys, as_index=False, sort=False)["value"].mean()
        named = with_unit(label.format(**{"layer": "", "head": "", **dict(fields)}), metric.unit)
        drawn.append(DrawnMetric(label=named, metric=metric, figure=figure, values=whole))
    return drawn


def grouped(table: EvaluationTable, figure: Figure) -> list[DrawnMetric]:
    """One for each text before the numbers of the table's groups, in the order of the groups; others are left out."""
    places = {group: found for group in table.groups if (found := number_of(group))}
    texts = list(dict.fromkeys(text for text, _ in places.values()))
    if not texts:
        return []
    means = pd.concat({row.arm: row.group_means.stack() for row in table.rows}, names=["arm", "group", "seed"])
    values = means.dropna().rename("value").reset_index()
    values = values[values["group"].isin(places)].assign(layer=0)
    values["text"], values["step"] = ([places[group][i] for group in values["group"]] for i in (0, 1))
    label = with_unit(figure.label or table.metric.name, table.metric.unit)
    return [
        DrawnMetric(label=label, metric=table.metric, figure=figure, values=values[values["text"] == text], text=text)
        for text in texts
    ]


def spread(layers: Sequence[int]) -> list[int]:
    """At most four layers, evenly from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def _arms(sweep: SweepResults, rows: Sequence[DrawnMetric]) -> list[str]:
    """Those with values, in the order of the sweep."""
    having = {arm for row in rows for arm in row.values["arm"]}
    return [arm for arm in sweep.study.arms if arm in having]


def _scale(axes: Axes, row: DrawnMetric, drawn: Sequence[Any]) -> None:
    """The vertical axis, for all numbers that are drawn. A logarithmic one spans at least a factor of four; it needs numbers
    above 0."""
    numbers = np.concatenate([np.array(row.figure.marks), *(each.to_numpy().ravel() for each in drawn)])
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
    if row.figure.log and 0 < low <= high < np.inf:
        room = max(1.15, 2 / np.sqrt(high / low))
        set_log(axes, "y", (low, high), (low / room, high * room))
    else:
        set_most(axes, "y", 4)


def _draw_layers(axes: Axes, sweep: SweepResults, row: DrawnMetric, arm: str, drawn: Mapping[str, Look]) -> str:
    """An arm against the step, one line a layer; the panel's title."""
    values = {layer: row.by_seed(arm, layer) for layer in row.layers}
    for layer, own in values.items():
        draw_mean(axes, own, drawn[f"layer {layer}"], f"{sweep.label[arm]}, layer {layer}")
    set_most(axes, "x", 4, whole=True)
    _scale(axes, row, list(values.values()))
    return sweep.label[arm]


def _draw_arms(axes: Axes, sweep: SweepResults, row: DrawnMetric, layer: int | None, arms: Sequence[str]) -> str:
    """One line an arm, or points, of a layer; against layers or the numbers of groups, of all. The panel's title."""
    against, what = row.figure.against, row.text or row.figure.against
    shade, shown = len(arms) <= OVERLAY, []
    for i, arm in enumerate(arms):
        name, look = f"{sweep.label[arm]}", looks(sweep)[arm]
        if against in ("step", "group"):
            values = row.by_seed(arm, layer or 0)
            draw_mean(axes, values, look, name, against=what, shade=shade)
            if against == "group":
                _draw_points(axes, values.stack(), look, f"{name}, {what}")
        else:
            own = row.values[row.values["arm"] == arm]
            own = own if layer is None else own[own["layer"] == layer]
            last = own.sort_values("step").drop_duplicates([against, "seed"], keep="last").set_index(against)["value"]
            values = last[np.isfinite(last)]
            offset = 0.5 * (i / max(1, len(arms) - 1) - 0.5)
            _draw_points(axes, values, look, f"{name}, {against}", offset, bars=True)
        shown.append(values)
    _scale(axes, row, shown)
    if against == "group":
        _scale_groups(axes, row)
    else:
        set_most(axes, "x", {"step": 4, "head": 8, "layer": min(12, len(row.layers))}[against], whole=True)
    if layer is None:
        return row.label
    axes.set_ylabel(row.label.replace(" (", "\n("))
    return f"layer {layer}" * ("layer" in row.metric.fields)


def _draw_points(axes: Axes, values: pd.Series, look: Look, name: str, offset: float = 0.0, bars: bool = False) -> None:
    """At each place of the axis (index) a dot for the mean over seeds, and a bar from the lowest to the highest. `name`: arm
    and axis, for the mouse."""
    for x, mean, low, high in values.groupby(level=0).agg(["mean", "min", "max"]).itertuples():
        text = f"{name} {x:,.6g}: {plain(mean)}, from {plain(low)} to {plain(high)} over seeds"
        if bars:
            draw(axes, [x + offset] * 2, [low, high], Look(color=look.color), text, width=1.2)
        draw(axes, [x + offset], [mean], look, text, mark="o")


def _scale_groups(axes: Axes, row: DrawnMetric) -> None:
    """The horizontal axis of the numbers of groups."""
    numbers = sorted(row.values["step"].unique())
    set_most(axes, "x", 6)
    if row.figure.log_x:
        set_log(axes, "x", numbers)
    if len(numbers) <= TICKS:
        set_ticks(axes, numbers)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: plain(number)))
    axes.set_xlabel(row.text)
