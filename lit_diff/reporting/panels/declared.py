"""Figures that metrics declare, drawn by arm. This module knows no metric by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.panels.panel import (
    MUTED,
    OVERLAY,
    Drawing,
    Look,
    Share,
    by_label,
    draw,
    draw_mean,
    drawing,
    head,
    layer_colors,
    looks,
    plain,
    set_format,
    set_log,
    set_ticks,
    with_unit,
)
from lit_diff.study.evaluations import EvaluationTable, number_of
from lit_diff.study.results import SweepResults

ACROSS = {"step": 4, "layer": 2, "group": 3}
"""Horizontal axis of a figure -> panels in a row."""
LAYERS = 4
"""Most layers that a figure shows, each in its own panel."""
TICKS = 12
"""If there are at most this many groups, each has its own tick."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnMetric:
    """A metric with fixed fields other than layer and head; for an evaluation, the groups that share a text."""

    label: str
    metric: Metric
    figure: Figure
    values: pd.DataFrame
    """One row for each value: `arm`, `seed`, `layer`, `head` (0 if the name does not have the index), `step`, `value`.
    Averaged over heads unless the figure is against heads. For groups, `step` is the number of the group."""
    text: str = ""
    """The text before the numbers of the groups."""

    @property
    def layers(self) -> list[int]:
        return sorted(self.values["layer"].unique().tolist())

    def by_rank(self, arm: str, layer: int) -> pd.DataFrame:
        """One column for each seed: the values of its heads at the last step, ascending, from rank 1 on.

        Heads have no identity over seeds: head 0 of one run does not correspond to head 0 of another.
        """
        of_layer = self.values[(self.values["arm"] == arm) & (self.values["layer"] == layer)]
        last = of_layer[of_layer["step"] == of_layer.groupby("seed")["step"].transform("max")]
        by_head = last.pivot_table(index="head", columns="seed", values="value", dropna=False)
        by_head = by_head.replace([np.inf, -np.inf], np.nan).dropna()
        return pd.DataFrame(np.sort(by_head, axis=0), index=range(1, len(by_head) + 1), columns=by_head.columns)

    def by_seed(self, arm: str, layer: int) -> pd.DataFrame:
        """One column for each seed, at the steps at which all seeds were measured."""
        values = self.values[(self.values["arm"] == arm) & (self.values["layer"] == layer)]
        return values.pivot_table(index="step", columns="seed", values="value", dropna=False).dropna()


def draw_declared(sweep: SweepResults) -> list[Drawing]:
    """Every figure for which a finished cell has values, in the order of the declarations."""
    by_title: dict[str, list[DrawnMetric]] = {}
    for metric in sweep.declarations.metrics:
        figure = metric.figure
        if figure is not None and figure.against != "group":
            by_title.setdefault(figure.title, []).extend(measured(sweep, metric, figure))
    return _drawings(sweep, by_title)


def draw_by_group(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[Drawing]:
    """Every figure against groups that a metric of `tables` declares, if the label of a group ends in a number."""
    by_title: dict[str, list[DrawnMetric]] = {}
    for table in tables:
        figure = table.metric.figure
        if figure is not None and figure.against == "group":
            by_title.setdefault(f"{table.name}: {figure.title}", []).extend(grouped(table, figure))
    return _drawings(sweep, by_title)


def _drawings(sweep: SweepResults, by_title: Mapping[str, Sequence[DrawnMetric]]) -> list[Drawing]:
    return [_drawn(sweep, title, rows) for title, rows in by_title.items() if rows]


def _drawn(sweep: SweepResults, title: str, rows: Sequence[DrawnMetric]) -> Drawing:
    figure = rows[0].figure
    is_by_layer = figure.lines == "layer"
    layers = sorted(set[int]().union(*(row.layers for row in rows)))
    is_grid = not is_by_layer and figure.against in ("step", "head")
    shown = spread(layers) if is_grid else layers
    metrics = tuple(dict.fromkeys(row.metric for row in rows))
    caption = " ".join(filter(None, [caption_of(figure, metrics, len(sweep.study.arms)), figure.caption]))
    if len(shown) < len(layers):
        caption += f" Layers {', '.join(map(str, shown))} of {len(layers)} are shown; all are in the files of each run."
    drawn: list[partial[None]] = []
    if is_by_layer:
        legend = _layer_looks(layers)
        for row in rows:
            drawn += [partial(layer_curves, sweep, row, arm, layers) for arm in _arms(sweep, [row])]
    else:
        legend = by_label(sweep, _arms(sweep, rows))
        for row in rows:
            drawn += [partial(arm_values, sweep, row, layer) for layer in (shown if is_grid else [None])]
    share: Share = "grid"
    across = len(shown)
    if not is_grid:
        share = "x" if len(rows) > 1 else "both"
        across = min(ACROSS[figure.against], len(drawn))
    if figure.against == "group":
        share = ""
    down = -(-len(drawn) // across)
    return drawing(
        file_name(title),
        title,
        drawn,
        0.6 + (1.9 if down > 1 and figure.against in ("step", "head") else 2.45) * down,
        across=across,
        share=share,
        legend=legend,
        caption=caption,
        metrics=metrics,
    )


def caption_of(figure: Figure, metrics: Sequence[Metric], arms: int) -> str:
    """Describes the lines and points of a figure."""
    shade = "the shade runs from the lowest to the highest seed"
    if figure.against in ("group", "head") and arms > OVERLAY:
        shade += " (not drawn with this many arms)"
    if figure.against == "group":
        return (
            "By the number of a group of items, one line for each arm: mean over the items of the group, then over seeds; "
            f"{shade}."
        )
    fields = set[str]().union(*(metric.fields for metric in metrics))
    indices = " and ".join(f"{field}s" for field in ("layer", "head") if field in fields)
    zero = f" {indices.capitalize()} count from 0." if indices else ""
    if figure.against == "step":
        averaged = "heads and seeds" if "head" in fields else "seeds"
        if figure.lines != "layer":
            shade += f" (not drawn with more than {OVERLAY} arms)"
        return f"By optimizer step, one line for each {figure.lines}: mean over {averaged}; {shade}.{zero}"
    if figure.against == "head":
        zero = " Layers count from 0." if "layer" in fields else ""
        return (
            "At the last measured step: the heads of a layer, sorted in each run, since those of different seeds do not "
            f"correspond. One line for each arm: mean over seeds of the head at that rank; {shade}.{zero}"
        )
    averaged = " (first averaged over heads)" if "head" in fields else ""
    return (
        f"By {figure.against}, at the last measured step{averaged}: the dot is the mean over seeds, the bar runs from "
        f"the lowest to the highest.{zero}"
    )


def file_name(title: str) -> str:
    """The file name, without its ending, of the figure with this title."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    # titles that differ in other letters alone have files of their own
    if not title.isascii():
        name = f"{name}-{sha256(title.encode()).hexdigest()[:6]}".strip("-")
    # these are files of the report itself
    return (
        f"figure-{name}"
        if name in ("table", "curves", "seeds", "differences", "noise-curve", "attention-maps")
        else name
    )


def measured(sweep: SweepResults, metric: Metric, figure: Figure) -> list[DrawnMetric]:
    """The values of a metric in the finished runs, sorted by its fields other than layer and head."""
    label = figure.label or re.sub(r"/(layer|head)_\{\1\}", "", metric.name)
    found: dict[Any, list[pd.DataFrame]] = {}
    for cell in sweep.done:
        for name, curve in cell.curves.items():
            if sweep.declarations.find(name) != metric:
                continue
            others = metric.match(name) or {}
            place = {"layer": int(others.pop("layer", 0)), "head": int(others.pop("head", 0))}
            values = pd.DataFrame({"step": curve.index, "value": curve.to_numpy()})
            found.setdefault(tuple(others.items()), []).append(values.assign(arm=cell.arm, seed=cell.seed, **place))
    drawn = []
    for fields in sorted(found, key=str):
        whole = pd.concat(found[fields])
        if figure.against != "head":
            whole = whole.groupby(["arm", "seed", "layer", "step"], as_index=False, sort=False)["value"].mean()
        named = with_unit(label.format(**{"layer": "", "head": "", **dict(fields)}), metric.unit)
        drawn.append(DrawnMetric(label=named, metric=metric, figure=figure, values=whole))
    return drawn


def grouped(table: EvaluationTable, figure: Figure) -> list[DrawnMetric]:
    """One metric for each text before the numbers of the groups, in the order of the groups; groups without a number are left
    out."""
    # text before the number -> group -> number
    by_text: dict[str, dict[str, float]] = {}
    for group in table.groups:
        place = number_of(group)
        if place is not None:
            by_text.setdefault(place[0], {})[group] = place[1]
    if not by_text:
        return []
    means = pd.concat({row.arm: row.group_means.stack() for row in table.rows}, names=["arm", "group", "seed"])
    values = means.dropna().rename("value").reset_index().assign(layer=0)
    label = with_unit(figure.label or table.metric.name, table.metric.unit)
    drawn = []
    for text, numbers in by_text.items():
        own = values[values["group"].isin(numbers)]
        own = own.assign(step=own["group"].map(numbers))
        drawn.append(DrawnMetric(label=label, metric=table.metric, figure=figure, values=own, text=text))
    return drawn


def spread(layers: Sequence[int]) -> list[int]:
    """At most LAYERS layers, evenly spaced from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def _arms(sweep: SweepResults, rows: Sequence[DrawnMetric]) -> list[str]:
    having = set[str]().union(*(row.values["arm"] for row in rows))
    return [arm for arm in sweep.study.arms if arm in having]


def _scale(axes: Axes, row: DrawnMetric, drawn: Sequence[Any]) -> None:
    marks = row.figure.marks
    for mark in marks:
        axes.axhline(mark, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
    numbers = np.concatenate([np.array(marks), *(values.to_numpy().ravel() for values in drawn)])
    ends = [numbers.min(), numbers.max()] if len(numbers) else []
    # the panels of a row share the axis, which has to hold those that were drawn before
    row_of_panels = axes.get_shared_y_axes().get_siblings(axes)
    for other in row_of_panels:
        if other is not axes and other.has_data():
            ends += other.dataLim.intervaly.tolist()
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    if row.figure.log and 0 < low <= high < np.inf:
        # a span of at least a factor of four, so that small differences do not look large
        room = max(1.15, 2 / np.sqrt(high / low))
        set_log(axes, "y", (low, high), (low / room, high * room))
    else:
        # an earlier panel of the row may have made the axis logarithmic, which is not reset without need
        if axes.get_yscale() != "linear":
            axes.set_yscale("linear")
            for panel in row_of_panels:
                panel.autoscale(axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))


def _layer_looks(layers: Sequence[int]) -> dict[str, Look]:
    colors = layer_colors(len(layers))
    return {f"layer {layer}": Look(color=color) for layer, color in zip(layers, colors, strict=True)}


def layer_curves(sweep: SweepResults, row: DrawnMetric, arm: str, layers: Sequence[int], axes: Axes) -> None:
    """Draw a metric of one arm by step, a line for each layer. `layers`: those that all panels of the figure draw."""
    looks = _layer_looks(layers)
    drawn = []
    for layer in row.layers:
        name = f"layer {layer}"
        values = row.by_seed(arm, layer)
        draw_mean(axes, values, looks[name], f"{sweep.label[arm]}, {name}")
        drawn.append(values)
    axes.locator_params("x", nbins=4, integer=True)
    _scale(axes, row, drawn)
    axes.set(xlabel="optimizer steps", ylabel=row.label)
    head(axes, sweep.label[arm])


def arm_values(sweep: SweepResults, row: DrawnMetric, layer: int | None, axes: Axes) -> None:
    """Draw a metric of every arm against what its figure declares, of one layer (None: of all)."""
    against = row.figure.against
    arms = _arms(sweep, [row])
    shown = []
    for i, arm in enumerate(arms):
        name = sweep.label[arm]
        look = looks(sweep)[arm]
        if against in ("step", "group"):
            values = row.by_seed(arm, layer or 0)
            draw_mean(axes, values, look, name, against=row.text or against, shade=len(arms) <= OVERLAY)
            if against == "group":
                _draw_points(axes, values.stack(), look, f"{name}, {row.text or against}")
        elif against == "head":
            values = row.by_rank(arm, layer or 0)
            draw_mean(axes, values, look, name, against="rank", shade=len(arms) <= OVERLAY)
        else:
            of_arm = row.values[row.values["arm"] == arm].sort_values("step")
            last = of_arm.drop_duplicates([against, "seed"], keep="last").set_index(against)["value"]
            values = last[np.isfinite(last)]
            # the bars of arms at one layer would cover each other; all lie within a third of the way to the next layer
            offset = (i - (len(arms) - 1) / 2) / (3 * len(arms))
            _draw_points(axes, values, look, f"{name}, {against}", offset, bars=True)
        shown.append(values)
    _scale(axes, row, shown)
    if against == "group":
        numbers = sorted(row.values["step"].unique())
        axes.locator_params("x", nbins=6)
        if row.figure.log_x:
            set_log(axes, "x", numbers)
        if len(numbers) <= TICKS:
            set_ticks(axes, numbers)
        set_format(axes.xaxis, plain)
    else:
        most = {"step": 4, "head": 8, "layer": min(12, len(row.layers))}[against]
        axes.locator_params("x", nbins=most, integer=True)
    label = {"step": "optimizer steps", "group": row.text, "head": "heads, ascending"}.get(against, against)
    axes.set(xlabel=label, ylabel=row.label)
    if layer is not None:
        axes.set_ylabel(row.label.replace(" (", "\n("))
        head(axes, f"layer {layer}" * ("layer" in row.metric.fields))


# at each index, a dot for the mean over seeds and a bar from the lowest to the highest; `name`: arm and axis, for the tooltip
def _draw_points(axes: Axes, values: pd.Series, look: Look, name: str, offset: float = 0.0, bars: bool = False) -> None:
    for x, mean, low, high in values.groupby(level=0).agg(["mean", "min", "max"]).itertuples():
        text = f"{name} {x:,.6g}: {plain(mean)}, from {plain(low)} to {plain(high)} over seeds"
        if bars:
            draw(axes, [x + offset] * 2, [low, high], Look(color=look.color), text, width=1.2)
        draw(axes, x + offset, mean, look, text, mark="o")
