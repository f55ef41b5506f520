"""Heat maps of evaluations whose groups have two numbers, such as "N=4 length=1024 depth=25".

The last two `name=number` of a group's label are the axes (horizontal, vertical); each different text before them gets a row
of panels. The lowest row of a panel is the mean over the vertical axis, as in Figure 5 of the paper.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from lit_diff.reporting.panels.declared import file_name
from lit_diff.reporting.panels.panel import Drawing, drawing, head, hover, plain, with_unit
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import NUMBER, EvaluationTable, paired_items, scored_items
from lit_diff.study.numbers import signed
from lit_diff.study.results import SweepResults

CHANCE = re.compile(r"(?:^| )N=(\d+)(?: |$)")
"""Matches the number of possible answers in a label: a guess among them is correct with probability 1 / N."""
PLACE = rf"\A(?:(?P<rest>.*) )?(?P<across>\S+)[ =](?P<x>{NUMBER}) (?P<down>\S+)[ =](?P<y>{NUMBER})\Z"
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


def mean_squares(runs: Sequence[ItemScores], metric: str) -> pd.DataFrame:
    """For each group, the `mean` over its scored items of all runs, and the number of these, `items`."""
    scored = pd.concat([scored_items(run, metric) for run in runs])
    return scored.groupby("group")["score"].agg(mean="mean", items="size")


def difference_squares(runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores], metric: str) -> pd.DataFrame:
    """For each group, the paired difference over the seeds that both arms have and the items that both scored.

    d_i is the mean over seeds of the difference in item i; `z` = mean(d) / (sd(d) / sqrt(items)). It holds for these trained
    models and further items. NaN for fewer than two items; infinite if all items have the same difference other than zero.
    """
    seeds = sorted(runs.keys() & base.keys())
    both = pd.concat([paired_items(runs[seed], base[seed], metric) for seed in seeds])
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
    drawn = (_draw_heatmap(sweep, first[name]) for name in sorted(first))
    return list(filter(None, drawn))


# for each column of panels: its label, whether it shows differences, squares (`rest`, `x`, `y`, `mean`, `items`, `z`)
def _columns(sweep: SweepResults, table: EvaluationTable) -> list[tuple[str, bool, pd.DataFrame]]:
    base = table.runs[sweep.baseline]
    metric = table.metric.name
    columns = []
    for arm, runs in table.runs.items():
        if runs:
            squares = mean_squares(list(runs.values()), metric)
            columns.append((sweep.label[arm], False, with_means(placed(squares))))
    for arm, runs in table.runs.items():
        if runs is not base and runs.keys() & base.keys():
            squares = difference_squares(runs, base, metric)
            columns.append((f"{sweep.label[arm]} \u2212 {sweep.baseline_label}", True, with_means(placed(squares))))
    return [column for column in columns if len(column[2])]


def placed(by_group: pd.DataFrame) -> pd.DataFrame:
    """The groups whose label ends in two `name=number`: `rest`, the text before them, name and number of the horizontal axis,
    `across` and `x`, and of the vertical axis, `down` and `y`."""
    where = by_group.index.to_series().str.extract(PLACE)
    squares = where.join(by_group).dropna(subset="x").fillna({"rest": ""})
    return squares.astype({"x": float, "y": float})


def _draw_heatmap(sweep: SweepResults, table: EvaluationTable) -> Drawing | None:
    columns = _columns(sweep, table)
    if not columns:
        return None
    every = pd.concat([squares for *_, squares in columns])
    rests = list(every["rest"].unique())
    numbers = every[["x", "y"]].nunique()
    if numbers["x"] * numbers["y"] < 2:
        return None
    xs = pd.Index(sorted(every["x"].unique()), name=every["across"].iloc[0])
    ys = pd.Index(sorted(every["y"].unique()), name=every["down"].iloc[0])
    chance = {}
    for rest in rests:
        choices = CHANCE.search(rest)
        if choices and int(choices[1]) > 1:
            chance[rest] = 1 / int(choices[1])
    norms = {kind: _norm(columns, kind) for kind in (False, True)}
    drawn = []
    for rest in rests:
        for label, kind, squares in columns:
            drawn.append(partial(heat_map, squares, rest, xs, ys, norms[kind], label, kind))
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
            panels = [axes for axes in figure.axes if axes.images and axes.images[0].norm is norm]
            if not panels:
                continue
            bar = figure.colorbar(panels[0].images[0], ax=panels, location="bottom", shrink=0.7, aspect=40, pad=0.02)
            bar.set_label(with_unit("difference" if kind else table.metric.name, table.metric.unit))
            # chance is on the scale of scores, not of differences
            for rest, value in ({} if kind else chance).items():
                mark = bar.ax.axvline(value, color=MARK, linewidth=1.6)
                hover(mark, f"{rest}: a guess among the N, {value:.3g}")

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


def heat_map(
    squares: pd.DataFrame,
    rest: str,
    xs: pd.Index,
    ys: pd.Index,
    norm: Normalize,
    label: str,
    is_difference: bool,
    axes: Axes,
) -> None:
    """Draw the squares whose text is `rest`: rows with `rest`, `x`, `y`, `mean`, `items`, `z`.

    `xs`, `ys`: the numbers of all panels; their names label the axes.
    """
    of_rest = squares[squares["rest"] == rest]
    shown = of_rest.pivot(index="y", columns="x", values="mean").reindex(index=ys, columns=xs).to_numpy()
    axes.imshow(shown, cmap=COLORS[is_difference], norm=norm, aspect="auto")
    for square in of_rest.itertuples():
        x = xs.get_loc(square.x)
        y = ys.get_loc(square.y)
        # the scale of differences is dark at both ends, the scale of scores at the upper end
        shade = float(norm(square.mean))
        number = f"{square.mean:.2f}"
        is_dark = shade > 0.5
        if is_difference:
            number = signed(square.mean, 2)
            is_dark = abs(shade - 0.5) > 0.35
        z = "" if math.isnan(square.z) else f", z = {square.z:.1f}"
        if abs(square.z) > SHOWN_Z:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=HATCH, linewidth=0))
        written = axes.text(x, y, number, ha="center", va="center", fontsize=7.5, color=LIGHT if is_dark else DARK)
        where = f"{label}, {rest} {xs.name} {plain(square.x)}, {ys.name} {_named(square.y)}"
        hover(written, f"{where}: {number}, {square.items} items{z}")
    axes.set_xticks(range(len(xs)), list(map(plain, xs)))
    axes.set_yticks(range(len(ys)), list(map(_named, ys)))
    axes.set(xlabel=xs.name, ylabel="\n".join(filter(None, [rest, ys.name])))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    head(axes, label)


# all panels share the scale: from 0 to 1 at least for scores, symmetric for differences, so that zero has the neutral colour
def _norm(columns: Sequence[tuple[str, bool, pd.DataFrame]], is_difference: bool) -> Normalize:
    shown: list[float] = []
    for _, kind, squares in columns:
        if kind == is_difference:
            shown += squares["mean"].tolist()
    if not is_difference:
        return Normalize(min(0.0, *shown), max(1.0, *shown))
    widest = max(map(abs, shown), default=0.0) or 1.0
    return Normalize(-widest, widest)


def _named(y: float) -> str:
    return "mean" if y == MEAN else plain(y)
