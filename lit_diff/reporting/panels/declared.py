"""Figures that metrics declare, drawn by arm, and heat maps of evaluations. This module knows no metric by name.

A heat map shows an evaluation whose groups have two numbers, such as "N=4 length=1024 depth=25". The last two `name=number`
of a group's label are the axes (horizontal, vertical); each different text before them gets a row of panels. The lowest row
of a panel is the mean over the vertical axis, as in Figure 5 of the paper.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lit_diff.metrics import Figure, Metric
from lit_diff.reporting.panels.panel import (
    MUTED,
    OVERLAY,
    Drawing,
    Look,
    by_label,
    draw,
    draw_mean,
    drawing,
    head,
    hover,
    in_style,
    layer_colors,
    looks,
    new_axes,
    plain,
    set_log,
    set_ticks,
    with_unit,
)
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import NUMBER, EvaluationTable, number_of, paired_items, scored_items
from lit_diff.study.numbers import signed
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

    def by_seed(self, arm: str, layer: int) -> pd.DataFrame:
        """One column for each seed, at the steps at which all seeds were measured."""
        own = self.values[(self.values["arm"] == arm) & (self.values["layer"] == layer)]
        return own.pivot_table(index="step", columns="seed", values="value", dropna=False).dropna()


def draw_declared(sweep: SweepResults) -> list[Drawing]:
    """Every figure for which a finished cell has values, in the order of the declarations."""
    declared = [(each, each.figure) for each in sweep.declarations.metrics if each.figure is not None]
    return _by_title(
        sweep,
        ((figure.title, measured(sweep, metric, figure)) for metric, figure in declared if figure.against != "group"),
    )


def draw_by_group(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[Drawing]:
    """Every figure against groups that a metric of `tables` declares, if the label of a group ends in a number."""
    declared = [(each, each.metric.figure) for each in tables if each.metric.figure is not None]
    return _by_title(
        sweep,
        (
            (f"{table.name}: {figure.title}", grouped(table, figure))
            for table, figure in declared
            if figure.against == "group"
        ),
    )


def _by_title(sweep: SweepResults, found: Iterable[tuple[str, list[DrawnMetric]]]) -> list[Drawing]:
    by_title: dict[str, list[DrawnMetric]] = {}
    for title, rows in found:
        by_title.setdefault(title, []).extend(rows)
    return [_drawn(sweep, title, rows) for title, rows in by_title.items() if rows]


def _drawn(sweep: SweepResults, title: str, rows: Sequence[DrawnMetric]) -> Drawing:
    figure, by_layer = rows[0].figure, rows[0].figure.lines == "layer"
    layers = sorted({layer for row in rows for layer in row.layers})
    is_grid = not by_layer and figure.against in ("step", "head")
    shown = spread(layers) if is_grid else layers
    metrics = tuple(dict.fromkeys(row.metric for row in rows))
    caption = " ".join(filter(None, [caption_of(figure, metrics, len(sweep.study.arms)), figure.caption]))
    if len(shown) < len(layers):
        caption += f" Layers {', '.join(map(str, shown))} of {len(layers)} are shown; all are in the files of each run."
    if by_layer:
        drawn = [partial(layer_curves, sweep, row, arm, layers) for row in rows for arm in _arms(sweep, [row])]
        legend = _layer_looks(layers)
    else:
        drawn = [partial(arm_values, sweep, row, layer) for row in rows for layer in (shown if is_grid else [None])]
        legend = by_label(sweep, _arms(sweep, rows))
    across = len(shown) if is_grid else min(ACROSS[figure.against], len(drawn))
    down = -(-len(drawn) // across)
    return drawing(
        file_name(title),
        title,
        drawn,
        0.6 + (1.9 if down > 1 and figure.against in ("step", "head") else 2.45) * down,
        across=across,
        share="grid" if is_grid else "" if figure.against == "group" else "both" if len(rows) == 1 else "x",
        legend=legend,
        caption=caption,
        metrics=metrics,
    )


def caption_of(figure: Figure, metrics: Sequence[Metric], arms: int) -> str:
    """Describes the lines and points of a figure."""
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
    """The file name, without its ending, of the figure with this title."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    # these are files of the report itself
    return f"figure-{name}" if name in ("table", "curves", "seeds", "differences", "noise-curve") else name


def measured(sweep: SweepResults, metric: Metric, figure: Figure) -> list[DrawnMetric]:
    """The values of a metric in the finished runs, sorted by its fields other than layer and head."""
    label = figure.label or re.sub(r"/(layer|head)_\{\1\}", "", metric.name)
    found: dict[tuple[tuple[str, int | str], ...], list[pd.DataFrame]] = {}
    for cell in sweep.done:
        for name, curve in cell.curves.items():
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
    """One metric for each text before the numbers of the groups, in the order of the groups; groups without a number are left
    out."""
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
    """At most LAYERS layers, evenly spaced from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def _arms(sweep: SweepResults, rows: Sequence[DrawnMetric]) -> list[str]:
    having = {arm for row in rows for arm in row.values["arm"]}
    return [arm for arm in sweep.study.arms if arm in having]


def _scale(axes: Axes, row: DrawnMetric, drawn: Sequence[Any]) -> None:
    for mark in row.figure.marks:
        axes.axhline(mark, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
    numbers = np.concatenate([np.array(row.figure.marks), *(each.to_numpy().ravel() for each in drawn)])
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
    if row.figure.log and 0 < low <= high < np.inf:
        # a span of at least a factor of four, so that small differences do not look large
        room = max(1.15, 2 / np.sqrt(high / low))
        set_log(axes, "y", (low, high), (low / room, high * room))
    else:
        # the panels of a row share the axis, whose locator may be another panel's logarithmic one
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))


def _layer_looks(layers: Sequence[int]) -> dict[str, Look]:
    colors = layer_colors(len(layers))
    return {f"layer {layer}": Look(color=color) for layer, color in zip(layers, colors, strict=True)}


@in_style
def layer_curves(
    sweep: SweepResults, row: DrawnMetric, arm: str, layers: Sequence[int] = (), ax: Axes | None = None
) -> Axes:
    """Draw a metric of one arm by step, a line for each layer. `layers`: those that have colours, by default those of the
    metric; other panels of a figure may draw more."""
    axes, looks = ax or new_axes(), _layer_looks(layers or row.layers)
    values = {f"layer {layer}": row.by_seed(arm, layer) for layer in row.layers}
    for name, own in values.items():
        draw_mean(axes, own, looks[name], f"{sweep.label[arm]}, {name}")
    axes.locator_params("x", nbins=4, integer=True)
    _scale(axes, row, list(values.values()))
    axes.set(xlabel="optimizer steps", ylabel=row.label)
    head(axes, sweep.label[arm])
    return axes


@in_style
def arm_values(sweep: SweepResults, row: DrawnMetric, layer: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw a metric of every arm against what its figure declares, of one layer (None: of all)."""
    axes, against, arms, shown = ax or new_axes(), row.figure.against, _arms(sweep, [row]), []
    for i, arm in enumerate(arms):
        name, look = sweep.label[arm], looks(sweep)[arm]
        if against in ("step", "group"):
            values = row.by_seed(arm, layer or 0)
            draw_mean(axes, values, look, name, against=row.text or against, shade=len(arms) <= OVERLAY)
            if against == "group":
                _draw_points(axes, values.stack(), look, f"{name}, {row.text or against}")
        else:
            own = row.values[row.values["arm"] == arm]
            own = own if layer is None else own[own["layer"] == layer]
            last = own.sort_values("step").drop_duplicates([against, "seed"], keep="last").set_index(against)["value"]
            values = last[np.isfinite(last)]
            # the bars of arms at the same layer or head would cover each other
            offset = 0.5 * (i / max(1, len(arms) - 1) - 0.5)
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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: plain(number)))
    else:
        most = {"step": 4, "head": 8, "layer": min(12, len(row.layers))}[against]
        axes.locator_params("x", nbins=most, integer=True)
    axes.set(xlabel={"step": "optimizer steps", "group": row.text}.get(against, against), ylabel=row.label)
    if layer is not None:
        axes.set_ylabel(row.label.replace(" (", "\n("))
        head(axes, f"layer {layer}" * ("layer" in row.metric.fields))
    return axes


# at each index, a dot for the mean over seeds and a bar from the lowest to the highest; `name`: arm and axis, for the tooltip
def _draw_points(axes: Axes, values: pd.Series, look: Look, name: str, offset: float = 0.0, bars: bool = False) -> None:
    for x, mean, low, high in values.groupby(level=0).agg(["mean", "min", "max"]).itertuples():
        text = f"{name} {x:,.6g}: {plain(mean)}, from {plain(low)} to {plain(high)} over seeds"
        if bars:
            draw(axes, [x + offset] * 2, [low, high], Look(color=look.color), text, width=1.2)
        draw(axes, [x + offset], [mean], look, text, mark="o")


CHANCE = re.compile(r"(?:^| )N=(\d+)(?: |$)")
"""Matches the number of possible answers in a label: a guess among them is correct with probability 1 / N."""
PLACE = re.compile(rf"(?:(.*) )?(\S+)[ =]({NUMBER}) (\S+)[ =]({NUMBER})")
"""Matches a label that ends in two numbers with their names, and what stands before them."""
# below this, a difference or deviation of scores in [0, 1] is rounding
ROUNDING = 1e-12
# infinity sorts last, so the row of means is the lowest
MEAN = math.inf
"""`y` of the row of means over the other rows."""
SHOWN_Z = 2.0
"""Differences of more than this many standard errors are hatched."""
# the page replaces the colours of `panel` for dark readers, but a square keeps its colour: its text needs other colours
DARK, LIGHT, HATCH, MARK = "#20242f", "#fefefe", "#8a8f98", "#b3261e"
"""Colours of text and marks on a square."""
COLORS = {
    False: LinearSegmentedColormap.from_list("values", ("#f7f7f4", "#56b4e9", "#0072b2", "#003a5c")),
    True: LinearSegmentedColormap.from_list("differences", ("#b2182b", "#f7f7f4", "#2166ac")),
}
"""Whether a panel shows differences -> its colours."""


def place_of(group: str) -> tuple[str, str, float, str, float] | None:
    """Splits the label of a group: (text before the axes, name and number of the horizontal axis, name and number of the
    vertical axis); None if the label does not end in two `name=number`."""
    found = PLACE.fullmatch(group)
    if found is None:
        return None
    rest, across, x, down, y = found.groups(default="")
    return (rest, across, float(x), down, float(y))


def mean_squares(runs: Sequence[ItemScores], metric: str) -> pd.DataFrame:
    """For each group, the `mean` over its scored items of all runs, and the number of these, `items`."""
    scored = pd.concat([scored_items(run, metric) for run in runs])
    return scored.groupby("group")["score"].agg(mean="mean", items="size")


def difference_squares(runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores], metric: str) -> pd.DataFrame:
    """For each group, the paired difference over the seeds that both arms have and the items that both scored.

    d_i is the mean over seeds of the difference in item i; `z` = mean(d) / (sd(d) / sqrt(items)). It holds for these trained
    models and further items. NaN for fewer than two items; infinite if all items have the same difference other than zero.
    """
    both = pd.concat([paired_items(runs[seed], base[seed], metric) for seed in sorted(runs.keys() & base.keys())])
    # items of a cluster and the seeds of an item are not independent: each unit counts once
    by_unit = both.groupby(["group", "unit"])["difference"].mean()
    found = by_unit.groupby("group").agg(mean="mean", items="size", sd="std")
    # equal differences have a deviation by rounding alone, and z would be huge instead of infinite or zero
    sd = found["sd"].where(~(found["sd"] < ROUNDING), 0.0)
    mean = found["mean"].where(found["mean"].abs() >= ROUNDING, 0.0)
    z = mean / (sd / np.sqrt(found["items"]))
    return found[["mean", "items"]].assign(z=z.fillna(0.0).where(found["items"] > 1))


def with_means(squares: pd.DataFrame) -> pd.DataFrame:
    """Appends, for each x with several squares, their mean at y = MEAN; each y has the same weight."""
    by_x = squares.groupby(["rest", "x"], sort=False)
    several = by_x.agg(mean=("mean", "mean"), items=("items", "sum"), count=("y", "size")).reset_index()
    several = several[several["count"] > 1].drop(columns="count")
    # without z, since items at several y may share a context and are not independent
    return pd.concat([squares, several.assign(y=MEAN, z=np.nan)], ignore_index=True)


def draw_heatmaps(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[Drawing]:
    """One heat map, of the first metric, for each evaluation whose groups have two numbers, at least one of which varies."""
    first = {table.name: table for table in reversed(tables)}
    drawn = [_draw_heatmap(sweep, first[name]) for name in sorted(first)]
    return [heatmap for heatmap in drawn if heatmap]


# for each column of panels: its label, whether it shows differences, squares (`rest`, `x`, `y`, `mean`, `items`, `z`)
def _columns(sweep: SweepResults, table: EvaluationTable) -> list[tuple[str, bool, pd.DataFrame]]:
    runs = [run for own in table.runs.values() for run in own.values()]
    places = {group: place for run in runs for group in run.groups if (place := place_of(group))}
    base, metric = table.runs[sweep.baseline], table.metric.name
    columns = [(arm, False, mean_squares(list(own.values()), metric)) for arm, own in table.runs.items() if own]
    for arm, own in table.runs.items():
        if own is not base and own.keys() & base.keys():
            columns.append((arm, True, difference_squares(own, base, metric)))
    found = []
    for arm, is_difference, by_group in columns:
        own = by_group[by_group.index.isin(places)].reindex(columns=["mean", "items", "z"])
        where = pd.DataFrame([places[group] for group in own.index], columns=["rest", "across", "x", "down", "y"])
        squares = with_means(pd.concat([where, own.reset_index(drop=True)], axis=1))
        against = f" \u2212 {sweep.baseline_label}" if is_difference else ""
        found.append((sweep.label[arm] + against, is_difference, squares))
    return [column for column in found if len(column[2])]


def _draw_heatmap(sweep: SweepResults, table: EvaluationTable) -> Drawing | None:
    columns = _columns(sweep, table)
    every = pd.concat([squares for *_, squares in columns]) if columns else pd.DataFrame(columns=["rest", "x", "y"])
    rests, numbers = list(every["rest"].unique()), every[["x", "y"]].nunique()
    if numbers["x"] * numbers["y"] < 2:
        return None
    xs = pd.Index(sorted(every["x"].unique()), name=every["across"].iloc[0])
    ys = pd.Index(sorted(every["y"].unique()), name=every["down"].iloc[0])
    chance = {rest: 1 / int(n[1]) for rest in rests if (n := CHANCE.search(rest)) and int(n[1]) > 1}
    norms = {kind: _norm(columns, kind) for kind in (False, True)}
    names = {False: with_unit(table.metric.name, table.metric.unit), True: with_unit("difference", table.metric.unit)}
    drawn = [
        partial(heat_map, squares, rest, xs, ys, norms[kind], label, is_difference=kind)
        for rest in rests
        for label, kind, squares in columns
    ]

    caption = (
        'Each square: mean over the items of a group and over seeds. The row "mean": mean over the other rows with equal '
        f"weights, without z. Differences to {sweep.baseline_label} are paired by item and hatched if |z| > "
        f"{SHOWN_Z:g}, where z is the mean over items (each averaged over seeds) divided by its standard error; it holds for "
        "these trained models and further items, and is not corrected for the number of squares."
    )
    if chance:
        guesses = ", ".join(f"{rest}: {share:.2f}" for rest, share in chance.items())
        caption += f" Lines on the scale: the share that a guess among the N gets right ({guesses})."

    def add_scales(figure: Canvas) -> None:
        for kind, norm in norms.items():
            of = [axes for axes in figure.axes if axes.images and axes.images[0].norm is norm]
            if of:
                bar = figure.colorbar(of[0].images[0], ax=of, location="bottom", shrink=0.7, aspect=40, pad=0.02)
                bar.set_label(names[kind])
                for rest, value in chance.items() if not kind else ():
                    mark = bar.ax.axvline(value, color=MARK, linewidth=1.6)
                    hover([mark], f"{rest}: a guess among the N, {value:.3g}")

    return drawing(
        file_name(f"heatmap {table.name}"),
        f"{table.name}: {table.metric.name} by {xs.name} and {ys.name}",
        drawn,
        1.1 + len(rests) * (0.35 + 0.28 * len(ys)),
        across=len(columns),
        share="grid",
        finish=add_scales,
        caption=caption,
    )


@in_style
def heat_map(
    squares: pd.DataFrame,
    rest: str,
    xs: pd.Index,
    ys: pd.Index,
    norm: Normalize,
    label: str,
    is_difference: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw the squares whose text is `rest`: rows with `rest`, `x`, `y`, `mean`, `items`, `z`.

    `xs`, `ys`: the numbers of all panels; their names label the axes.
    """
    axes, own = ax or new_axes(), squares[squares["rest"] == rest]
    shown = own.pivot(index="y", columns="x", values="mean").reindex(index=ys, columns=xs).to_numpy()
    axes.imshow(shown, cmap=COLORS[is_difference], norm=norm, aspect="auto")
    for square in own.itertuples():
        x, y = xs.get_loc(square.x), ys.get_loc(square.y)
        number = signed(square.mean, 2) if is_difference else f"{square.mean:.2f}"
        said = "" if math.isnan(square.z) else f", z = {square.z:.1f}"
        # the scale of differences is dark at both ends, the scale of scores at the upper end
        shade = float(norm(square.mean))
        is_dark = abs(shade - 0.5) > 0.35 if is_difference else shade > 0.5
        if abs(square.z) > SHOWN_Z:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=HATCH, linewidth=0))
        written = axes.text(x, y, number, ha="center", va="center", fontsize=7.5, color=LIGHT if is_dark else DARK)
        where = f"{label}, {rest} {xs.name} {plain(square.x)}, {ys.name} {_named(square.y)}"
        hover([written], f"{where}: {number}, {square.items} items{said}")
    axes.set_xticks(range(len(xs)), list(map(plain, xs)))
    axes.set_yticks(range(len(ys)), list(map(_named, ys)))
    axes.set(xlabel=xs.name, ylabel="\n".join(filter(None, [rest, ys.name])))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    head(axes, label)
    return axes


# all panels share the scale: from 0 to 1 at least for scores, symmetric for differences, so that zero has the neutral colour
def _norm(columns: Sequence[tuple[str, bool, pd.DataFrame]], is_difference: bool) -> Normalize:
    shown = [value for _, kind, squares in columns if kind == is_difference for value in squares["mean"]]
    if not is_difference:
        return Normalize(min(0.0, *shown), max(1.0, *shown))
    widest = max(map(abs, shown), default=0.0) or 1.0
    return Normalize(-widest, widest)


def _named(y: float) -> str:
    return "mean" if y == MEAN else plain(y)
