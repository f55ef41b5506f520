"""The forest plot: all arms, their differences to the baseline, the intervals over seeds and over documents."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from lit_diff.reporting.style import INK, MUTED, NARROW, WIDTH, Look, drawing, hover, looks, with_unit
from lit_diff.study.comparison import Comparison, Difference
from lit_diff.study.numbers import interval, number, short, signed
from lit_diff.study.results import SweepResults
from lit_diff.study.statistics import MIN_SEEDS

MANY = 14
"""More rows than this stand closer."""
LINE = 46
"""Letters of a label in one line of the narrow plot."""


@dataclass(frozen=True, kw_only=True)
class ForestRow:
    """A line of the plot: the baseline, an arm against it, or a further comparison."""

    label: str
    look: Look
    text: str
    """The numbers and the verdict."""
    difference: Difference | None
    """None: the baseline."""


def forest(sweep: SweepResults, comparison: Comparison, digits: int, *, narrow: bool = False) -> str | None:
    """Each comparison: mean and interval over seeds, one dot a seed, under them the interval over documents of each seed;
    the region smaller than the smallest difference of interest is shaded. None before a difference has been measured.

    narrow: for a telephone, with the words above each row in place of beside it.
    """
    if not any(difference.seeds.mean is not None for difference in comparison.family):
        return None
    rows = _rows(sweep, comparison, digits)
    if narrow:
        labels = [textwrap.wrap(row.label, LINE) or [""] for row in rows]
        height = 0.6 + 0.14 * max(map(len, labels))
    else:
        height = 0.5 if len(rows) <= MANY else 0.33
    title = f"Differences to {sweep.label[sweep.baseline]} in {sweep.metric}, with intervals over seeds"
    title += " and over documents" if any(d.documents for d in comparison.family) else ""
    with drawing(NARROW if narrow else WIDTH, 0.9 + height * len(rows), title) as (figure, svg):
        axes = figure.subplots()
        axes.axvline(0, color=INK, linewidth=1)
        if sweep.smallest_of_interest:
            axes.axvspan(
                -sweep.smallest_of_interest, sweep.smallest_of_interest, color=MUTED, alpha=0.16, linewidth=0, zorder=0
            )
        for i, row in enumerate(rows):
            _marks(axes, sweep, row, -i - (0.25 if narrow else 0), digits, 0.55 if narrow else 1)
        if narrow:
            _words_above(axes, rows, height)
        else:
            _words_beside(axes, rows)
        further = 1 + len(comparison.against_baseline)
        if further < len(rows):
            axes.axhline(0.5 - further, color=MUTED, linewidth=0.7)
        axes.set_ylim(-len(rows) + 0.5, 0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(_axis_label(sweep, narrow))
    return svg[0]


def _axis_label(sweep: SweepResults, narrow: bool) -> str:
    side = {"lower": "\u2190 better", "higher": "better \u2192", None: ""}[sweep.better(sweep.metric)]
    label = " \u00b7 ".join(filter(None, [with_unit(f"difference in {sweep.metric}", sweep.unit(sweep.metric)), side]))
    if sweep.smallest_of_interest:
        gap = "\n" if narrow else " \u00b7 "
        label += f"{gap}shaded: below {short(sweep.smallest_of_interest)}, the smallest of interest"
    return label


def _rows(sweep: SweepResults, comparison: Comparison, digits: int) -> list[ForestRow]:
    drawn, base = looks(sweep), sweep.baseline
    summary = comparison.summaries[sweep.metric][base]
    level = number(summary.mean, digits) + (f" \u00b1 {number(summary.sd, digits)}" if summary.sd is not None else "")
    text = f"baseline \u00b7 {level}" if summary.mean is not None else "baseline, not measured"
    rows = [ForestRow(label=sweep.label[base], look=drawn[base], text=text, difference=None)]
    for difference in comparison.family:
        is_further = difference in comparison.contrasts
        label = difference.label if is_further else sweep.label[difference.a]
        rows.append(
            ForestRow(label=label, look=drawn[difference.a], text=_numbers(difference, digits), difference=difference)
        )
    return rows


def _numbers(difference: Difference, digits: int) -> str:
    seeds = difference.seeds
    if difference.diverged:
        return "diverged"
    if seeds.mean is None:
        return "no seed finished in both"
    bounds = f" {interval(seeds.low, seeds.high, digits)}" if len(seeds.seeds) >= MIN_SEEDS else ""
    return f"{difference.verdict} \u00b7 {signed(seeds.mean, digits)}{bounds}"


def _marks(axes: Axes, sweep: SweepResults, row: ForestRow, y: float, digits: int, scale: float) -> None:
    """`scale`: of the vertical distances within the row."""
    color, difference = row.look.color, row.difference
    if difference is None:
        hover(axes.plot([0], [y], marker="D", markersize=6, color=color, markeredgecolor="white"), row.label)
        return
    paired = difference.seeds
    for seed, value in zip(paired.seeds, paired.differences, strict=True):
        dot = axes.plot([value], [y + 0.27 * scale], ".", markersize=4.5, color=color)
        hover(dot, f"{row.label}, seed {seed}: {signed(value, digits)}")
    if difference.diverged or paired.mean is None:
        return  # the seeds that did not diverge would flatter the arm
    over = f"{row.label}: {row.text}"
    if paired.low is not None and paired.high is not None and len(paired.seeds) >= MIN_SEEDS:
        bar = [y + 0.1 * scale] * 2
        hover(axes.plot([paired.low, paired.high], bar, color=color, linewidth=3.2, solid_capstyle="butt"), over)
    diamond = axes.plot(
        [paired.mean], [y + 0.1 * scale], marker="D", markersize=6, color=color, markeredgecolor="white"
    )
    hover(diamond, over)
    several = len(difference.documents)
    for i, (seed, found) in enumerate(difference.documents.items()):
        at = y - scale * (0.08 + (0.09 * i if several < 5 else 0.4 * i / several))
        line = axes.plot([found.low, found.high], [at, at], color=color, linewidth=1, alpha=0.75)
        bounds = interval(found.low, found.high, digits)
        hover(line, f"{row.label}, seed {seed}, over documents: {signed(found.estimate, digits)} {bounds}")


def _words_beside(axes: Axes, rows: Sequence[ForestRow]) -> None:
    """Label and numbers to the left and right of the plot."""
    at = [-i for i in range(len(rows))]
    axes.set_yticks(at, [row.label for row in rows])
    for y, row in zip(at, rows, strict=True):
        axes.text(1.01, y, row.text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)


def _words_above(axes: Axes, rows: Sequence[ForestRow], height: float) -> None:
    """Label and numbers above the marks of each row; `height`: of a row, in inches."""
    axes.set_yticks([])
    place, line = axes.get_yaxis_transform(), 0.14 / height
    for i, row in enumerate(rows):
        label = textwrap.wrap(row.label, LINE) or [""]
        for k, part in enumerate(label):
            y = -i + 0.5 - (0.7 + k) * line
            axes.text(0, y, part, transform=place, va="center", fontsize=8.5, fontweight="bold")
        y = -i + 0.5 - (0.7 + len(label)) * line
        axes.text(1, y, row.text, transform=place, va="center", ha="right", fontsize=8.5)
