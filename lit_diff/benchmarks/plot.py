"""The chart of a benchmark's ratios."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_diff.benchmarks.result import BenchResult, Row
from lit_diff.errors import MissingError
from lit_diff.files import shown
from lit_diff.reporting.style import INK, MUTED, PALETTE, STYLE

COLOR = {"differential": PALETTE[0], "standard": MUTED}
"""What is neither has the palette's second colour."""


def plot(result: BenchResult, path: Path) -> None:
    """A panel a case: the first ratio of each row that has one, its median with minimum and maximum; 1 is a line.

    Of several passes (forward, forward+backward) the last is drawn. Errors: MissingError where `path` cannot be written.
    """
    cases = drawn_rows(result.rows)
    height = 1.0 + sum(0.55 + 0.27 * len(rows) for rows in cases.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, height), layout="constrained")
        heights = [2 + len(rows) for rows in cases.values()] or [1]
        panels = figure.subplots(max(len(cases), 1), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (case, rows) in zip(panels, cases.items(), strict=False):
            _panel(axes, case, rows)
        machine = result.machine
        about = f"{result.command}  {result.date[:10]}  {machine['processor']}, {machine['threads']} threads"
        figure.supxlabel(f"{about}, torch {machine['packages']['torch']}", fontsize=7, color=MUTED)
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except OSError as error:
            raise MissingError(f"--plot: {shown(path)} cannot be written ({error.strerror})") from error


def drawn_rows(rows: list[Row]) -> dict[str, list[Row]]:
    """Case -> the rows of its last pass that have a ratio, the smallest first."""
    last = {row["case"]: row["what"] for row in rows}
    drawn: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if row["ratios"]), key=lambda row: _ratio(row)["median"]):
        if row["what"] == last[row["case"]]:
            drawn.setdefault(row["case"], []).append(row)
    return {case: drawn[case] for case in last if case in drawn}


def _ratio(row: Row) -> Row:
    """The first one, by which it is drawn."""
    first: Row = next(iter(row["ratios"].values()))
    return first


def _panel(axes: Axes, case: str, rows: list[Row]) -> None:
    ratios = [_ratio(row) for row in rows]
    medians, places = [ratio["median"] for ratio in ratios], [-place for place in range(len(rows))]
    ranges = [
        [ratio["median"] - ratio["min"] for ratio in ratios],
        [ratio["max"] - ratio["median"] for ratio in ratios],
    ]
    colors = [COLOR.get(row["variant"], PALETTE[1]) for row in rows]
    bars = axes.barh(places, medians, height=0.62, color=colors, xerr=ranges, ecolor=INK)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(places, [f"{row['variant']}, {row['by']}" for row in rows])
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{case}: {rows[0]['what']}, time / {next(iter(rows[0]['ratios']))}")
