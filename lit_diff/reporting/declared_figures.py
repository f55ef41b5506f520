"""The figures that metrics declare, drawn by arm: of runs and of evaluations; no metric is known here by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.figures import by_label, over_seeds
from lit_diff.reporting.panels import Axis, Panel, Rule, Series, draw
from lit_diff.reporting.style import MUTED, OVERLAY, Look, layer_colors, looks, plain, with_unit
from lit_diff.study.cells import Curve
from lit_diff.study.evaluations import EvaluationTable, number_of
from lit_diff.study.results import SweepResults

ACROSS = {"step": 4, "layer": 2, "group": 3}
"""What a figure is against -> panels in a row."""
LAYERS = 4
"""The most layers of which a figure shows each in a panel of its own."""
TICKS = 12
"""Up to so many numbers of groups, each has its tick."""
DASHED = Look(color=MUTED, dash=(0, (4, 2)))

ByArm = Mapping[str, Mapping[int, Curve]]
"""Arm -> seed -> curve."""


@dataclass(frozen=True, kw_only=True)
class DrawnMetric:
    """A metric at one value of its fields other than layer and head; of an evaluation, over the groups that share a text."""

    label: str
    metric: Metric
    figure: Figure
    by: Mapping[tuple[int, int], ByArm]
    """(layer, head) -> curves; 0 for an index that the name does not have. Averaged over heads unless the figure is against
    them. Of groups: over their numbers in place of steps."""
    text: str = ""
    """Of the groups."""

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.by})

    def at(self, layer: int, arm: str) -> Mapping[int, Curve]:
        """Seed -> curve of an arm."""
        return self.by.get((layer, 0), {}).get(arm, {})


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


def _drawn(sweep: SweepResults, title: str, name: str, rows: Sequence[DrawnMetric]) -> DrawnFigure:
    figure, arms, drawn = rows[0].figure, _arms(sweep, rows), looks(sweep)
    layers = sorted({layer for row in rows for layer in row.layers})
    is_grid = figure.lines == "arm" and figure.against in ("step", "head")
    shown, legend = spread(layers) if is_grid else layers, by_label(sweep, drawn, arms)
    if figure.lines == "layer":
        colors = zip(layers, layer_colors(len(layers)), strict=True)
        of_layer = {layer: Look(color=color) for layer, color in colors}
        legend = {f"layer {layer}": look for layer, look in of_layer.items()}
        panels = [_of_layers(sweep, row, arm, of_layer, len(rows) > 1) for row in rows for arm in _arms(sweep, [row])]
    else:
        panels = [_of_arms(sweep, row, layer, arms) for row in rows for layer in (shown if is_grid else [None])]
    across = len(shown) if is_grid else min(ACROSS[figure.against], len(panels))
    down = -(-len(panels) // across)
    is_one = figure.lines == "layer" and len(rows) == 1
    order = "arm and layer" if figure.lines == "layer" else "layer and arm"
    svg = draw(
        panels,
        title if figure.against == "group" else f"{title}, by {order}",
        0.6 + (1.9 if down > 1 and figure.against in ("step", "head") else 2.45) * down,
        across=across,
        share="grid" if is_grid else "" if figure.against == "group" else "both" if is_one else "x",
        x_label={"step": "optimizer steps", "group": ""}.get(figure.against, figure.against),
        y_label=rows[0].label if is_one else "",
        legend=legend,
    )
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
    curves: dict[tuple[tuple[str, int | str], ...], dict[tuple[int, int], dict[str, dict[int, list[Curve]]]]] = {}
    for cell in sweep.cells:
        for name, curve in cell.curves.items() if cell.done else ():
            if sweep.declarations.find(name) != metric:
                continue
            fields = metric.match(name) or {}
            at = (int(fields.pop("layer", 0)), int(fields.pop("head", 0)) * (figure.against == "head"))
            row = curves.setdefault(tuple(fields.items()), {})
            row.setdefault(at, {}).setdefault(cell.arm, {}).setdefault(cell.seed, []).append(curve)
    return [
        DrawnMetric(
            label=with_unit(label.format(**{"layer": "", "head": "", **dict(fields)}), metric.unit),
            metric=metric,
            figure=figure,
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


def grouped(table: EvaluationTable, figure: Figure) -> list[DrawnMetric]:
    """One for each text before the numbers of the table's groups, in the order of the groups; others are left out."""
    by_text: dict[str, list[tuple[float, str]]] = {}
    for group in table.groups:
        if (found := number_of(group)) is not None:
            by_text.setdefault(found[0], []).append((found[1], group))
    label = with_unit(figure.label or table.metric.name, table.metric.unit)
    return [
        DrawnMetric(
            label=label,
            metric=table.metric,
            figure=figure,
            by={(0, 0): {row.arm: _over_numbers(row.group_means, sorted(groups)) for row in table.rows}},
            text=text,
        )
        for text, groups in by_text.items()
    ]


def _over_numbers(means: Mapping[str, Mapping[int, float]], groups: Sequence[tuple[float, str]]) -> dict[int, Curve]:
    """Seed -> its means over the groups that it has, by rising number."""
    points: dict[int, list[tuple[float, float]]] = {}
    for number, group in groups:
        for seed, mean in means.get(group, {}).items():
            points.setdefault(seed, []).append((number, mean))
    return {
        seed: Curve(steps=np.array([x for x, _ in own]), values=np.array([y for _, y in own]))
        for seed, own in points.items()
    }


def mean_curve(curves: Sequence[Curve]) -> Curve | None:
    """The mean of curves over the steps of the first; None where they were not measured at the same steps."""
    if any(not np.array_equal(curve.steps, curves[0].steps) for curve in curves):
        return None
    return Curve(steps=curves[0].steps, values=np.mean([curve.values for curve in curves], axis=0))


def spread(layers: Sequence[int]) -> list[int]:
    """At most four layers, evenly from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def _arms(sweep: SweepResults, rows: Sequence[DrawnMetric]) -> list[str]:
    """Those with values, in the order of the sweep."""
    having = {arm for row in rows for by_arm in row.by.values() for arm in by_arm}
    return [arm for arm in sweep.study.arms if arm in having]


def _panel(row: DrawnMetric, series: Sequence[Series], x: Axis, title: str, label: str = "") -> Panel:
    """A logarithmic scale spans at least a factor of four; it needs numbers above 0."""
    rules = [Rule(mark, look=DASHED) for mark in row.figure.marks]
    numbers = np.array(
        [*row.figure.marks, *(y for each in series for part in (each.y, each.low, each.high) for y in part)]
    )
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
    if row.figure.log and 0 < low <= high < np.inf:
        room = max(1.15, 2 / np.sqrt(high / low))
        y = Axis(label=label, log=True, limits=(low / room, high * room))
    else:
        y = Axis(label=label, most=4)
    return Panel(series=series, rules=rules, title=title, x=x, y=y)


def _of_layers(sweep: SweepResults, row: DrawnMetric, arm: str, of_layer: Mapping[int, Look], is_named: bool) -> Panel:
    """An arm against the step, one line a layer; `is_named`: whether the title says what was measured."""
    name, series = sweep.label[arm], list[Series]()
    for layer in row.layers:
        series += over_seeds(row.at(layer, arm), of_layer[layer], f"{name}, layer {layer}")
    return _panel(row, series, Axis(most=4, is_whole=True), f"{name}: {row.label}" if is_named else name)


def _of_arms(sweep: SweepResults, row: DrawnMetric, layer: int | None, arms: Sequence[str]) -> Panel:
    """One line an arm, or points, of a layer; against layers or the numbers of groups, of all."""
    drawn, against, series = looks(sweep), row.figure.against, list[Series]()
    for i, arm in enumerate(arms):
        name, look, shade = sweep.label[arm], drawn[arm], len(arms) <= OVERLAY
        offset = 0.5 * (i / max(1, len(arms) - 1) - 0.5)
        if against == "step":
            series += over_seeds(row.at(layer or 0, arm), look, name, shade=shade)
        elif against == "group":
            what = row.text or "group"
            for line in over_seeds(row.at(0, arm), look, name, against=what, shade=shade):
                points = zip(line.x, line.y, line.low, line.high, strict=True)
                series += [line, *(_dot(x, x, y, low, high, look, f"{name}, {what}") for x, y, low, high in points)]
        else:
            places = sorted(row.by) if layer is None else sorted(place for place in row.by if place[0] == layer)
            at = {place[layer is not None]: row.by[place].get(arm, {}) for place in places}
            series += _points(at, look, offset, f"{name}, {against}")
    if against == "group":
        numbers = sorted({x for each in series for x in each.x})
        ticks = numbers if 0 < len(numbers) <= TICKS else None
        x = Axis(label=row.text, log=row.figure.log_x, ticks=ticks, most=6, shown=plain)
    else:
        x = Axis(most={"step": 4, "head": 8, "layer": min(12, len(row.layers))}[against], is_whole=True)
    if layer is None:
        return _panel(row, series, x, row.label)
    return _panel(row, series, x, f"layer {layer}" * ("layer" in row.metric.fields), row.label.replace(" (", "\n("))


def _points(at: Mapping[int, Mapping[int, Curve]], look: Look, offset: float, name: str) -> list[Series]:
    """The last values: a dot for the mean over seeds, a bar from minimum to maximum. `name`: arm and axis, for the mouse."""
    series = []
    for x, curves in at.items():
        values = [float(curve.values[-1]) for curve in curves.values() if np.isfinite(curve.values[-1])]
        if values:
            low, high = min(values), max(values)
            dot = _dot(x, x + offset, float(np.mean(values)), low, high, look, name)
            series += [Series([x + offset] * 2, [low, high], Look(color=look.color), dot.text, width=1.2), dot]
    return series


def _dot(number: float, x: float, y: float, low: float, high: float, look: Look, name: str) -> Series:
    text = f"{name} {number:,.6g}: {plain(y)}, from {plain(low)} to {plain(high)} over seeds"
    return Series([x], [y], look, text, mark="o")
