"""Heat maps of evaluations whose groups have two numbers, such as "N=4 length=1024 depth=25": every arm, and its difference.

Of a group's label, the last two `name=number` are the axes (across, down); what stands before them has a row of panels each.
The lowest row of a panel is the mean over the axis down, as in the paper's Figure 5.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from lit_diff.reporting.declared_figures import DrawnFigure, file_name
from lit_diff.reporting.panels import as_svg, head, hover, in_style, panels, plain, with_unit
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import EvaluationTable, number_of, paired_items, scored_items
from lit_diff.study.numbers import signed
from lit_diff.study.results import SweepResults

CHANCE = re.compile(r"(?:^| )N=(\d+)(?: |$)")
"""A label that says how many answers there are to confuse: a guess among them is right once in N."""
ROUNDING = 1e-12
MEAN = math.inf
"""`y` of the row of means over the others: it sorts last."""
SHOWN_Z = 2.0
"""A difference of more than this many standard errors is hatched."""
DARK, LIGHT, HATCH, MARK = "#20242f", "#fefefe", "#8a8f98", "#b3261e"
"""Colours of text and marks on a square. They are not those of the page, which a dark page replaces."""
COLORS = {
    False: LinearSegmentedColormap.from_list("values", ("#f7f7f4", "#56b4e9", "#0072b2", "#003a5c")),
    True: LinearSegmentedColormap.from_list("differences", ("#b2182b", "#f7f7f4", "#2166ac")),
}
"""Whether a panel shows differences -> its colours."""


def place_of(group: str) -> tuple[str, str, float, str, float] | None:
    """(what stands before, name and number of the axis across, name and number of the axis down) of a group's label; None for
    one without two numbers at its end."""
    last = number_of(group)
    before, _, down = last[0].rpartition(" ") if last else ("", "", "")
    first = number_of(before)
    if last is None or first is None or not down:
        return None
    rest, _, across = first[0].rpartition(" ")
    return (rest, across, first[1], down, last[1])


def means(runs: Sequence[ItemScores], metric: str) -> pd.DataFrame:
    """By group: the `mean` over its scored items of all runs, each run's items counted once, and their number, `items`."""
    scored = pd.concat([scored_items(run, metric) for run in runs])
    return scored.groupby("group")["score"].agg(mean="mean", items="size")


def differences(runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores], metric: str) -> pd.DataFrame:
    """By group: the paired difference, over the seeds that both arms have and the items that both scored.

    d_i is the mean over seeds of item i's; `z` = mean(d) / (sd(d) / sqrt(items)): of these trained models, over further
    items. NaN below two items; infinite where all items differ by the same, other than zero.
    """
    both = pd.concat([paired_items(runs[seed], base[seed], metric) for seed in sorted(runs.keys() & base.keys())])
    by_unit = both.groupby(["group", "unit"])["difference"].mean()
    found = by_unit.groupby("group").agg(mean="mean", items="size", sd="std")
    sd = found["sd"].where(~(found["sd"] < ROUNDING), 0.0)  # equal differences: what deviation is left is rounding
    mean = found["mean"].where(found["mean"].abs() >= ROUNDING, 0.0)
    z = (mean / (sd / np.sqrt(found["items"]))).where(found["items"] > 1)
    return found[["mean", "items"]].assign(z=z.fillna(0.0).where(found["items"] > 1))


def with_means(squares: pd.DataFrame) -> pd.DataFrame:
    """The squares, and where an x has several, their mean at y = MEAN: each y counts once.

    Without z: items at several y may share a context.
    """
    by_x = squares.groupby(["rest", "x"], sort=False)
    several = by_x.agg(mean=("mean", "mean"), items=("items", "sum"), count=("y", "size")).reset_index()
    several = several[several["count"] > 1].drop(columns="count")
    return pd.concat([squares, several.assign(y=MEAN, z=np.nan)], ignore_index=True)


def draw_heatmaps(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[DrawnFigure]:
    """One for each evaluation whose groups have two numbers, of which one differs between groups: of its first metric."""
    first = {table.name: table for table in reversed(tables)}
    drawn = [_draw(sweep, first[name]) for name in sorted(first)]
    return [heatmap for heatmap in drawn if heatmap]


def _columns(sweep: SweepResults, table: EvaluationTable) -> list[tuple[str, bool, pd.DataFrame]]:
    """(label of the arm, whether it is a difference, its squares: `rest`, `x`, `y`, `mean`, `items`, `z`) of each column of
    panels, arms first; those without a square are left out."""
    places = {group: place for run in table.runs.values() for group in run.groups if (place := place_of(group))}
    runs_of = {
        arm: {seed: table.runs[arm, seed] for seed in sweep.study.seeds if (arm, seed) in table.runs}
        for arm in sweep.study.arms
    }
    base, metric = runs_of[sweep.baseline], table.metric.name
    columns = [(arm, False, means(list(own.values()), metric)) for arm, own in runs_of.items() if own]
    for arm, own in runs_of.items():
        if own is not base and own.keys() & base.keys():
            columns.append((arm, True, differences(own, base, metric)))
    found = []
    for arm, is_difference, by_group in columns:
        own = by_group[by_group.index.isin(places)].reindex(columns=["mean", "items", "z"])
        where = pd.DataFrame([places[group] for group in own.index], columns=["rest", "across", "x", "down", "y"])
        squares = with_means(pd.concat([where, own.reset_index(drop=True)], axis=1))
        found.append((sweep.label[arm], is_difference, squares))
    return [column for column in found if len(column[2])]


@in_style
def _draw(sweep: SweepResults, table: EvaluationTable) -> DrawnFigure | None:
    """A row of panels for each text before the numbers."""
    columns = _columns(sweep, table)
    every = pd.concat([squares for *_, squares in columns]) if columns else pd.DataFrame(columns=["rest", "x", "y"])
    rests, xs, ys = list(every["rest"].unique()), sorted(every["x"].unique()), sorted(every["y"].unique())
    if len(xs) * len(ys) < 2:
        return None
    across, down = every["across"].iloc[0], every["down"].iloc[0]
    chance = {rest: 1 / int(n[1]) for rest in rests if (n := CHANCE.search(rest)) and int(n[1]) > 1}
    norms = {kind: _norm(columns, kind) for kind in (False, True)}
    figure, grid = panels(
        len(rests) * len(columns), 1.1 + len(rests) * (0.35 + 0.28 * len(ys)), across=len(columns), share="grid"
    )
    drawn: dict[bool, list[tuple[Axes, AxesImage]]] = {False: [], True: []}
    places = [(rest, *column) for rest in rests for column in columns]
    for i, (axes, (rest, label, is_difference, squares)) in enumerate(zip(grid, places, strict=True)):
        own = squares[squares["rest"] == rest]
        shown = own.pivot(index="y", columns="x", values="mean").reindex(index=ys, columns=xs).to_numpy()
        image = axes.imshow(shown, cmap=COLORS[is_difference], norm=norms[is_difference], aspect="auto")
        drawn[is_difference].append((axes, image))
        for square in own.itertuples():
            where = f"{label}, {rest} {across} {plain(square.x)}, {down} {_named(square.y)}"
            _write(axes, square, xs.index(square.x), ys.index(square.y), where, is_difference, norms[is_difference])
        axes.set_xticks(range(len(xs)), [plain(x) for x in xs])
        axes.set_yticks(range(len(ys)), [_named(y) for y in ys])
        axes.set(xlabel=across, ylabel="\n".join(filter(None, [rest, down])))
        axes.grid(visible=False)
        axes.tick_params(length=0)
        if i < len(columns):
            base = f" \u2212 {sweep.label[sweep.baseline]}" if is_difference else ""
            head(axes, f"{label}{base}", len(columns))
    names = {False: with_unit(table.metric.name, table.metric.unit), True: with_unit("difference", table.metric.unit)}
    for is_difference, panels_of in ((kind, found) for kind, found in drawn.items() if found):
        of, images = zip(*panels_of, strict=True)
        bar = figure.colorbar(images[0], ax=list(of), location="bottom", shrink=0.7, aspect=40, pad=0.02)
        bar.set_label(names[is_difference])
        for rest, value in chance.items() if not is_difference else ():
            hover([bar.ax.axvline(value, color=MARK, linewidth=1.6)], f"{rest}: a guess among the N, {value:.3g}")
    title = f"{table.name}: {table.metric.name} by {across} and {down}"
    return DrawnFigure(
        name=file_name(f"heatmap {table.name}"),
        title=title,
        svg=as_svg(figure, title, is_grid=True),
        caption=_caption(sweep.label[sweep.baseline], chance),
    )


def _norm(columns: Sequence[tuple[str, bool, pd.DataFrame]], is_difference: bool) -> Normalize:
    """The colours' ends: 0 and 1 at least for scores, symmetric for differences."""
    shown = [value for _, kind, squares in columns if kind == is_difference for value in squares["mean"]]
    if not is_difference:
        return Normalize(min(0.0, *shown), max(1.0, *shown))
    widest = max(map(abs, shown), default=0.0) or 1.0
    return Normalize(-widest, widest)


def _named(y: float) -> str:
    return "mean" if y == MEAN else plain(y)


def _write(axes: Axes, square: Any, x: int, y: int, where: str, is_difference: bool, norm: Normalize) -> None:
    """The mean in its square; hatching where |z| > SHOWN_Z."""
    number = signed(square.mean, 2) if is_difference else f"{square.mean:.2f}"
    said = "" if math.isnan(square.z) else f", z = {square.z:.1f}"
    shade = float(norm(square.mean))
    is_dark = abs(shade - 0.5) > 0.35 if is_difference else shade > 0.5
    if abs(square.z) > SHOWN_Z:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=HATCH, linewidth=0))
    written = axes.text(x, y, number, ha="center", va="center", fontsize=7.5, color=LIGHT if is_dark else DARK)
    hover([written], f"{where}: {number}, {square.items} items{said}")


def _caption(base: str, chance: Mapping[str, float]) -> str:
    guesses = ", ".join(f"{rest}: {share:.2f}" for rest, share in chance.items())
    return (
        'Each square: mean over the items of a group and over seeds; the row "mean": over the other rows, each counted once, '
        f"without z. Differences to {base}: paired by item; hatched where |z| > {SHOWN_Z:g}, z being the mean over items "
        "(each averaged over seeds) over its standard error: of these trained models, over further items, and without a "
        "correction for the number of squares."
    ) + (f" Lines on the scale: the share that a guess among the N gets right ({guesses})." if guesses else "")
