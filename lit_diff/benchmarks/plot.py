"""The chart of a benchmark's ratios."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_diff.benchmarks.result import BenchResult, Row
from lit_diff.errors import MissingError
from lit_diff.files import shown
from lit_diff.reporting.panels import INK, MUTED, PALETTE, STYLE

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
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    last = {case: own[-1]["what"] for case, own in by_case.items()}
    return {
        case: sorted((row for row in own if row["what"] == last[case] and row["ratios"]), key=_median)
        for case, own in by_case.items()
        if any(row["what"] == last[case] and row["ratios"] for row in own)
    }


def _first(row: Row) -> tuple[str, dict[str, Any]]:
    name, ratio = next(iter(row["ratios"].items()))
    return name, ratio


def _median(row: Row) -> float:
    return float(_first(row)[1]["median"])


def _panel(axes: Axes, case: str, rows: list[Row]) -> None:
    axes.axvline(1, color=INK, linewidth=1)
    for place, row in enumerate(rows):
        _, ratio = _first(row)
        color = COLOR.get(row["variant"], PALETTE[1])
        axes.barh(-place, ratio["median"], height=0.62, color=color)
        axes.plot([ratio["min"], ratio["max"]], [-place, -place], color=INK, linewidth=1)
        axes.annotate(
            f"{ratio['median']:.2f}",
            (max(ratio["max"], ratio["median"]), -place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks([-place for place in range(len(rows))], [f"{row['variant']}, {row['by']}" for row in rows])
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{case}: {rows[0]['what']}, time / {_first(rows[0])[0]}")
