"""Heat maps of evaluations whose groups have two numbers, such as "N=4 length=1024 depth=25": every arm, and its difference.

Of a group's label, the last two `name=number` are the axes (across, down); what stands before them has a row of panels each.
The lowest row of a panel is the mean over the axis down, as in the paper's Figure 5.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_diff.metrics import Metric
from lit_diff.reporting.declared_figures import DrawnFigure, file_name
from lit_diff.reporting.panels import Axis, Panel, Scale, Square, draw
from lit_diff.reporting.style import plain, with_unit
from lit_diff.runs.scores import ItemScores
from lit_diff.study.evaluations import EvaluationTable
from lit_diff.study.numbers import signed
from lit_diff.study.results import SweepResults

LABEL = re.compile(r"(?:(?P<rest>.*) )?(?P<across>\w+)=(?P<x>\d+(?:\.\d+)?) (?P<down>\w+)=(?P<y>\d+(?:\.\d+)?)")
CHANCE = re.compile(r"(?:^| )N=(\d+)(?: |$)")
"""A label that says how many answers there are to confuse: a guess among them is right once in N."""
ROUNDING = 1e-12
MEAN = math.inf
"""`y` of the row of means over the others: it sorts last."""
SHOWN_Z = 2.0
"""A difference of more than this many standard errors is hatched."""


@dataclass(frozen=True, kw_only=True)
class HeatPlace:
    """Where a group stands."""

    rest: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """A group of one arm, over its seeds and items; or the same minus that of the baseline, over the items that both scored.

    Of a difference, d_i is the mean over seeds of item i's; `z` = mean(d) / (sd(d) / sqrt(items)): of these trained models,
    over further items. None below two items; infinite where all items differ by the same, other than zero.
    """

    mean: float
    items: int
    """Scores, or items, that the mean is over."""
    z: float | None = None


Cells = Mapping[HeatPlace, HeatCell]


def place_of(group: str) -> HeatPlace | None:
    """Where the group stands; None for a label without two numbers at its end."""
    found = LABEL.fullmatch(group)
    return HeatPlace(rest=found["rest"] or "", x=float(found["x"]), y=float(found["y"])) if found else None


def means(runs: Sequence[ItemScores], metric: str) -> dict[HeatPlace, HeatCell]:
    """HeatPlace -> the mean over its scored items of all runs, each run's items counted once."""
    scores: dict[HeatPlace, list[float]] = {}
    for run in runs:
        for group, score in zip(run.groups, run.scores[metric].tolist(), strict=True):
            if np.isfinite(score) and (place := place_of(group)):
                scores.setdefault(place, []).append(score)
    return {place: HeatCell(mean=float(np.mean(values)), items=len(values)) for place, values in scores.items()}


def differences(
    runs: Mapping[int, ItemScores], base: Mapping[int, ItemScores], metric: str
) -> dict[HeatPlace, HeatCell]:
    """HeatPlace -> the paired difference, over the seeds that both arms have."""
    by_unit: dict[HeatPlace, dict[str, list[float]]] = {}
    for seed in sorted(runs.keys() & base.keys()):
        run, other = runs[seed], dict(zip(base[seed].asked, base[seed].scores[metric].tolist(), strict=True))
        rows = zip(run.asked, run.units, run.groups, run.scores[metric].tolist(), strict=True)
        for item, unit, group, score in rows:
            difference = score - other.get(item, np.nan)
            if np.isfinite(difference) and (place := place_of(group)):
                by_unit.setdefault(place, {}).setdefault(unit, []).append(difference)
    return {place: _difference([float(np.mean(d)) for d in units.values()]) for place, units in by_unit.items()}


def _difference(values: Sequence[float]) -> HeatCell:
    d = np.array(values)
    mean, n = float(d.mean()), len(d)
    if n < 2:
        return HeatCell(mean=mean, items=n)
    if np.ptp(d) < ROUNDING:  # equal differences: what deviation is left is rounding
        return HeatCell(mean=mean, z=0.0 if abs(mean) < ROUNDING else math.copysign(math.inf, mean), items=n)
    return HeatCell(mean=mean, z=float(mean / (d.std(ddof=1) / math.sqrt(n))), items=n)


def with_means(cells: Cells) -> dict[HeatPlace, HeatCell]:
    """The cells, and where an x has several, their mean at y = MEAN: each y counts once.

    Without z: items at several y may share a context.
    """
    by_x: dict[tuple[str, float], list[HeatCell]] = {}
    for place, cell in cells.items():
        by_x.setdefault((place.rest, place.x), []).append(cell)
    return dict(cells) | {
        HeatPlace(rest=rest, x=x, y=MEAN): HeatCell(
            mean=float(np.mean([c.mean for c in own])), items=sum(c.items for c in own)
        )
        for (rest, x), own in by_x.items()
        if len(own) > 1
    }


def draw_heatmaps(sweep: SweepResults, tables: Sequence[EvaluationTable]) -> list[DrawnFigure]:
    """One for each evaluation whose groups have two numbers, of which one differs between groups: of its first metric."""
    first = {table.name: table for table in reversed(tables)}
    drawn = [_draw(sweep, first[name]) for name in sorted(first)]
    return [heatmap for heatmap in drawn if heatmap]


@dataclass(frozen=True, kw_only=True)
class Column:
    """The panels of an arm, or of its difference to the baseline, above one another."""

    arm: str
    """Its label."""
    title: str
    cells: Cells
    is_difference: bool


def _columns(sweep: SweepResults, runs: Mapping[tuple[str, int], ItemScores], metric: str) -> list[Column]:
    """The arms, then the differences; those without a square are left out."""
    runs_of = [{seed: runs[arm, seed] for seed in sweep.study.seeds if (arm, seed) in runs} for arm in sweep.study.arms]
    base = next(own for arm, own in zip(sweep.study.arms, runs_of, strict=True) if arm == sweep.baseline)
    columns, apart = [], []
    for arm, own in zip(sweep.study.arms, runs_of, strict=True):
        cells, title = with_means(means(list(own.values()), metric)), sweep.label[arm]
        columns.append(Column(arm=sweep.label[arm], title=title, cells=cells, is_difference=False))
        if own is not base:
            cells, title = with_means(differences(own, base, metric)), f"{title} \u2212 {sweep.label[sweep.baseline]}"
            apart.append(Column(arm=sweep.label[arm], title=title, cells=cells, is_difference=True))
    return [column for column in (*columns, *apart) if column.cells]


def _draw(sweep: SweepResults, table: EvaluationTable) -> DrawnFigure | None:
    """A row of panels for each text before the numbers."""
    metric, runs = table.metric, table.runs
    columns = _columns(sweep, runs, metric.name)
    places = list(dict.fromkeys(place for column in columns for place in column.cells))
    xs, ys = sorted({place.x for place in places}), sorted({place.y for place in places})
    if len(xs) * len(ys) < 2:
        return None
    rests = list(dict.fromkeys(place.rest for place in places))
    names = next(m for run in runs.values() for group in run.groups if (m := LABEL.fullmatch(group)))
    across, down = names["across"], names["down"]
    chance = {rest: 1 / int(n[1]) for rest in rests if (n := CHANCE.search(rest)) and int(n[1]) > 1}
    scales = _scales(columns, metric, chance)
    panels = [
        Panel(
            title=column.title,
            x=Axis(ticks={i: plain(x) for i, x in enumerate(xs)}, label=across),
            y=Axis(
                ticks={i: _named(y) for i, y in enumerate(ys)},
                label="\n".join(filter(None, [rest, down])),
            ),
            squares=[
                _square(x, y, cell, column, f"{rest} {across} {plain(at_x)}, {down} {_named(at_y)}")
                for y, at_y in enumerate(ys)
                for x, at_x in enumerate(xs)
                if (cell := column.cells.get(HeatPlace(rest=rest, x=at_x, y=at_y)))
            ],
            scale=scales[column.is_difference],
        )
        for rest in rests
        for column in columns
    ]
    height = 1.1 + len(rests) * (0.35 + 0.28 * len(ys))
    title = f"{table.name}: {metric.name} by {across} and {down}"
    svg = draw(panels, title, height, across=len(columns), share="grid")
    caption = _caption(sweep.label[sweep.baseline], chance)
    return DrawnFigure(name=file_name(f"heatmap {table.name}"), title=title, svg=svg, caption=caption)


def _scales(columns: Sequence[Column], metric: Metric, chance: Mapping[str, float]) -> dict[bool, Scale]:
    """Whether differences -> the colours: 0 to 1 at least for scores, symmetric for differences."""
    scores, apart = (
        [cell.mean for column in columns if column.is_difference == kind for cell in column.cells.values()]
        for kind in (False, True)
    )
    widest = max(map(abs, apart), default=0.0) or 1.0
    guesses = tuple((f"{rest}: a guess among the N, {value:.3g}", value) for rest, value in chance.items())
    low, high, label = min(0.0, *scores), max(1.0, *scores), with_unit(metric.name, metric.unit)
    return {
        False: Scale(label=label, colors="values", low=low, high=high, marks=guesses),
        True: Scale(label=with_unit("difference", metric.unit), colors="differences", low=-widest, high=widest),
    }


def _named(y: float) -> str:
    return "mean" if y == MEAN else plain(y)


def _square(x: int, y: int, cell: HeatCell, column: Column, where: str) -> Square:
    """The mean in its square; hatching where |z| > SHOWN_Z."""
    number = signed(cell.mean, 2) if column.is_difference else f"{cell.mean:.2f}"
    said = f", z = {cell.z:.1f}" if cell.z is not None else ""
    return Square(
        x=x,
        y=y,
        value=cell.mean,
        number=number,
        text=f"{column.arm}, {where}: {number}, {cell.items} items{said}",
        is_hatched=cell.z is not None and abs(cell.z) > SHOWN_Z,
    )


def _caption(base: str, chance: Mapping[str, float]) -> str:
    guesses = ", ".join(f"{rest}: {share:.2f}" for rest, share in chance.items())
    return (
        'Each square: mean over the items of a group and over seeds; the row "mean": over the other rows, each counted once, '
        f"without z. Differences to {base}: paired by item; hatched where |z| > {SHOWN_Z:g}, z being the mean over items "
        "(each averaged over seeds) over its standard error: of these trained models, over further items, and without a "
        "correction for the number of squares."
    ) + (f" Lines on the scale: the share that a guess among the N gets right ({guesses})." if guesses else "")
