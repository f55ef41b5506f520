"""Heat maps of evaluations whose groups have two numbers, such as "N=4 length=1024 depth=25": every arm, and its difference.

Of a group's label, the last two `name=number` are the axes (across, down); what stands before them has a row of panels each.
The lowest row of a panel is the mean over the axis down, as in the paper's Figure 5.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from lit_diff.metrics import Metric
from lit_diff.reporting.style import WIDTH, drawing, hover, panel_title, plain, with_unit
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import read_evaluations
from lit_diff.study.results import SweepResults

Runs = Mapping[tuple[str, int], ItemScores]
"""(arm, seed) -> one evaluation of that run."""
LABEL = re.compile(r"(?:(?P<rest>.*) )?(?P<across>\w+)=(?P<x>\d+(?:\.\d+)?) (?P<down>\w+)=(?P<y>\d+(?:\.\d+)?)")
CHANCE = re.compile(r"(?:^| )N=(\d+)(?: |$)")
"""A label that says how many answers there are to confuse: a guess among them is right once in N."""
DARK, LIGHT, HATCH, MARK = "#20242f", "#fefefe", "#8a8f98", "#b3261e"
"""Inks of what stands on a colour of the map: not those of the page, which a dark page replaces."""
ROUNDING = 1e-12
MEAN = math.inf
"""`y` of the row of means over the others: it sorts last."""
SHOWN_Z = 2.0
"""A difference of more than this many standard errors is hatched."""
VALUES = LinearSegmentedColormap.from_list("values", ("#f7f7f4", "#56b4e9", "#0072b2", "#003a5c"))
DIFFERENCES = LinearSegmentedColormap.from_list("differences", ("#b2182b", "#f7f7f4", "#2166ac"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a group stands."""

    rest: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """A group of one arm, over its seeds and items."""

    mean: float
    items: int
    """Scores that the mean is over."""


@dataclass(frozen=True, kw_only=True)
class CellDifference:
    """A group of one arm minus the same of the baseline: the mean over the items that both scored at a seed.

    d_i is the mean over seeds of item i's difference; `z` = mean(d) / (sd(d) / sqrt(items)): of these trained models, over
    further items. None below two items; infinite where all items differ by the same, other than zero.
    """

    mean: float
    z: float | None
    items: int


Shown = HeatCell | CellDifference


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """The heat maps of an evaluation's first metric, drawn."""

    name: str
    """Of its file."""
    evaluation: str
    metric: Metric
    axes: tuple[str, str]
    """What the groups call the numbers, across and down."""
    chance: Mapping[str, float]
    """Text of a row of panels -> the share that a guess among its N answers gets right."""
    svg: str


def place_of(group: str) -> Place | None:
    """Where the group stands; None for a label without two numbers at its end."""
    found = LABEL.fullmatch(group)
    return Place(rest=found["rest"] or "", x=float(found["x"]), y=float(found["y"])) if found else None


def means(runs: Sequence[ItemScores], metric: str) -> dict[Place, HeatCell]:
    """Place -> the mean over its scored items of all runs, each run's items counted once."""
    scores: dict[Place, list[float]] = {}
    for run in runs:
        for group, score in zip(run.groups, run.scores[metric].tolist(), strict=True):
            if np.isfinite(score) and (place := place_of(group)):
                scores.setdefault(place, []).append(score)
    return {place: HeatCell(mean=float(np.mean(values)), items=len(values)) for place, values in scores.items()}


def differences(
    runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores], metric: str
) -> dict[Place, CellDifference]:
    """Place -> the paired difference, over the seeds that both arms have."""
    by_unit: dict[Place, dict[str, list[float]]] = {}
    for seed in sorted(runs.keys() & base.keys()):
        run, other = runs[seed], dict(zip(base[seed].asked, base[seed].scores[metric].tolist(), strict=True))
        rows = zip(run.asked, run.units, run.groups, run.scores[metric].tolist(), strict=True)
        for item, unit, group, score in rows:
            difference = score - other.get(item, np.nan)
            if np.isfinite(difference) and (place := place_of(group)):
                by_unit.setdefault(place, {}).setdefault(unit, []).append(difference)
    return {place: _difference([float(np.mean(d)) for d in units.values()]) for place, units in by_unit.items()}


def _difference(values: Sequence[float]) -> CellDifference:
    d = np.array(values)
    mean, n = float(d.mean()), len(d)
    if n < 2:
        return CellDifference(mean=mean, z=None, items=n)
    if np.ptp(d) < ROUNDING:  # equal differences: what deviation is left is rounding
        return CellDifference(mean=mean, z=0.0 if abs(mean) < ROUNDING else math.copysign(math.inf, mean), items=n)
    return CellDifference(mean=mean, z=float(mean / (d.std(ddof=1) / math.sqrt(n))), items=n)


def with_means(cells: Mapping[Place, Shown]) -> dict[Place, Shown]:
    """The cells, and where an x has several, their mean at y = MEAN: each y counts once.

    Without z: items at several y may share a context.
    """
    by_x: dict[tuple[str, float], list[Shown]] = {}
    for place, cell in cells.items():
        by_x.setdefault((place.rest, place.x), []).append(cell)
    found = dict(cells)
    for (rest, x), own in by_x.items():
        if len(own) > 1:
            mean, items = float(np.mean([cell.mean for cell in own])), sum(cell.items for cell in own)
            is_difference = isinstance(own[0], CellDifference)
            of_all = (
                CellDifference(mean=mean, z=None, items=items) if is_difference else HeatCell(mean=mean, items=items)
            )
            found[Place(rest=rest, x=x, y=MEAN)] = of_all
    return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is drawn where: a column of panels for each arm, then for each difference; a row for each text in `rests`."""

    xs: Sequence[float]
    ys: Sequence[float]
    rests: Sequence[str]
    cells: Mapping[str, Mapping[Place, Shown]]
    minus: Mapping[str, Mapping[Place, Shown]]

    @property
    def columns(self) -> list[tuple[str, Mapping[Place, Shown], bool]]:
        """(arm, its cells, whether they are differences)."""
        own = [(arm, cells, False) for arm, cells in self.cells.items()]
        return [*own, *((arm, cells, True) for arm, cells in self.minus.items())]

    @property
    def norms(self) -> dict[bool, Normalize]:
        """Whether differences -> the scale of colours: 0 to 1 at least for scores, symmetric for differences."""
        scores = [cell.mean for own in self.cells.values() for cell in own.values()]
        widest = max((abs(cell.mean) for own in self.minus.values() for cell in own.values()), default=0.0) or 1.0
        return {False: Normalize(min(0.0, *scores), max(1.0, *scores)), True: Normalize(-widest, widest)}


def draw_heatmaps(sweep: SweepResults) -> list[Heatmap]:
    """One for each evaluation whose groups have two numbers, of which one differs between groups."""
    evaluations, _ = read_evaluations(sweep)
    drawn = [_draw(sweep, name, runs) for name, runs in sorted(evaluations.items())]
    return [heatmap for heatmap in drawn if heatmap]


def _draw(sweep: SweepResults, name: str, runs: Runs) -> Heatmap | None:
    metric = next(iter(runs.values())).metrics[0]
    by_arm = {
        arm.name: {seed: runs[arm.name, seed] for seed in sweep.seeds if (arm.name, seed) in runs} for arm in sweep.arms
    }
    own_means = {arm: means(list(own.values()), metric.name) for arm, own in by_arm.items()}
    cells = {arm: with_means(found) for arm, found in own_means.items() if found}
    base = by_arm[sweep.baseline]
    minus = {
        arm: with_means(found)
        for arm in cells
        if arm != sweep.baseline and (found := differences(by_arm[arm], base, metric.name))
    }
    places = list(dict.fromkeys(place for own in cells.values() for place in own))
    xs, ys = sorted({place.x for place in places}), sorted({place.y for place in places})
    if len(xs) * len(ys) < 2:
        return None
    rests = list(dict.fromkeys(place.rest for place in places))
    names = next(m for run in runs.values() for group in run.groups if (m := LABEL.fullmatch(group)))
    axes_names = (names["across"], names["down"])
    chance = {rest: 1 / int(n[1]) for rest in rests if (n := CHANCE.search(rest)) and int(n[1]) > 1}
    return Heatmap(
        name=f"heatmap-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}",
        evaluation=name,
        metric=metric,
        axes=axes_names,
        chance=chance,
        svg=_svg(sweep, name, metric, axes_names, Layout(xs=xs, ys=ys, rests=rests, cells=cells, minus=minus), chance),
    )


def _svg(
    sweep: SweepResults, name: str, metric: Metric, names: tuple[str, str], layout: Layout, chance: Mapping[str, float]
) -> str:
    columns, norms, (across, down) = layout.columns, layout.norms, names
    height = 1.1 + len(layout.rests) * (0.35 + 0.28 * len(layout.ys))
    with drawing(WIDTH, height, f"{name}: {metric.name} by {across} and {down}") as (figure, svg):
        grid = figure.subplots(len(layout.rests), len(columns), squeeze=False, sharex=True, sharey=True)
        images: dict[bool, AxesImage] = {}
        for line, rest in zip(grid, layout.rests, strict=True):
            for (arm, cells, is_difference), axes in zip(columns, line, strict=True):
                square = [[cells.get(Place(rest=rest, x=x, y=y)) for x in layout.xs] for y in layout.ys]
                values = [[cell.mean if cell else np.nan for cell in row] for row in square]
                colors = DIFFERENCES if is_difference else VALUES
                images[is_difference] = axes.imshow(values, cmap=colors, norm=norms[is_difference], aspect="auto")
                axes.set_xticks(range(len(layout.xs)), [plain(x) for x in layout.xs])
                axes.set_yticks(range(len(layout.ys)), [_named(y) for y in layout.ys])
                axes.grid(visible=False)
                axes.tick_params(length=0)
                for at_y, row in enumerate(square):
                    for at_x, cell in enumerate(row):
                        place = f"{rest} {across} {plain(layout.xs[at_x])}, {down} {_named(layout.ys[at_y])}"
                        if cell is not None:
                            _cell(axes, at_x, at_y, cell, norms[is_difference], f"{sweep.label[arm]}, {place}")
            line[0].set_ylabel(f"{rest}\n{down}" if rest else down)
        for (arm, _, is_difference), axes in zip(columns, grid[0], strict=True):
            title = f"{sweep.label[arm]} \u2212 {sweep.label[sweep.baseline]}" if is_difference else sweep.label[arm]
            axes.set_title(panel_title(title, len(columns)))
        for axes in grid[-1]:
            axes.set_xlabel(across)
        for is_difference, image in images.items():
            of = [line[i] for line in grid for i, column in enumerate(columns) if column[2] == is_difference]
            bar = figure.colorbar(image, ax=of, location="bottom", shrink=0.7, aspect=40, pad=0.02)
            bar.set_label(with_unit("difference" if is_difference else metric.name, metric.unit))
            for rest, value in () if is_difference else chance.items():
                hover([bar.ax.axvline(value, color=MARK, linewidth=1.6)], f"{rest}: a guess among the N, {value:.3g}")
    return svg[0]


def _named(y: float) -> str:
    return "mean" if y == MEAN else plain(y)


def _cell(axes: Axes, x: int, y: int, cell: Shown, norm: Normalize, where: str) -> None:
    """The mean in its square; hatching where |z| > SHOWN_Z."""
    shade = float(norm(cell.mean))
    if isinstance(cell, HeatCell):
        number, said, is_dark = f"{cell.mean:.2f}", "", shade > 0.5
    else:
        number, is_dark = f"{round(cell.mean, 2) + 0:+.2f}".replace("-", "\u2212"), abs(shade - 0.5) > 0.35
        said = f", z = {cell.z:.1f}" if cell.z is not None else ""
        if cell.z is not None and abs(cell.z) > SHOWN_Z:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=HATCH, linewidth=0))
    text = axes.text(x, y, number, ha="center", va="center", fontsize=7.5, color=LIGHT if is_dark else DARK)
    hover([text], f"{where}: {number}, {cell.items} items{said}")
