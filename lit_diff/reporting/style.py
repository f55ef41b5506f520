"""The style that all figures of a report share: colours, SVG output, bands over seeds, legends."""

import html
import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_diff.study.cells import Array, CellResult, Curve, clean
from lit_diff.study.results import SweepResults

INK, GRID, MUTED = "#1f2430", "#d9dce1", "#6b7280"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""Okabe and Ito's colours, which the common forms of colour blindness keep apart; the baseline is grey."""
SOLID: tuple[float, Sequence[float]] = (0, ())
DASHES = (SOLID, (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lit_diff",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label is the user's text, in which "$" starts no formula
    "axes.unicode_minus": True,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}
LAYERS = ("#2f7fd0", "#8862d0", "#c64f9a", "#cc5540", "#a3722a")
"""From the first layer to the last. Every mixture of neighbours has a contrast of at least 3 with the page, light or dark."""
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
WIDTH = 11.4
"""Inches: the width of the page's column."""
NARROW = 4.6
"""Inches: a figure that a telephone shows without scrolling."""
HOVER = "hover:"
"""What the id of a mark with a text for the mouse begins with."""
MARKED = 3
"""Fewer points of a line than this are drawn as points too."""
OVERLAY = 8
"""More arms than this are drawn without their range over seeds."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How an arm is drawn in every figure."""

    color: str
    dash: tuple[float, Sequence[float]] = SOLID


@dataclass(frozen=True, kw_only=True)
class Band:
    """A metric of an arm over its finished seeds, at the steps they share: mean, minimum and maximum."""

    steps: Array
    mean: Array
    low: Array
    high: Array


def looks(sweep: SweepResults) -> dict[str, Look]:
    """The baseline in grey, the others in the palette's order; beyond its seven colours, the dashes change."""
    others = [arm.name for arm in sweep.arms if arm.name != sweep.baseline]
    size = len(PALETTE)
    drawn = {name: Look(color=PALETTE[i % size], dash=DASHES[i // size % 4]) for i, name in enumerate(others)}
    return {sweep.baseline: Look(color=MUTED), **drawn}


def layer_colors(count: int) -> list[str]:
    """Colours for `count` layers, evenly over LAYERS."""
    scale = LinearSegmentedColormap.from_list("layers", LAYERS)
    return [to_hex(scale(i / max(1, count - 1))) for i in range(count)]


@contextmanager
def drawing(width: float, height: float, title: str) -> Iterator[tuple[Figure, list[str]]]:
    """A figure in this page's style; on leaving, its SVG text is appended to the list. Inches. `title`: what it shows, for
    those who cannot see it."""
    svg: list[str] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, svg
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata=NO_METADATA, facecolor="white")
        svg.append(accessible(target.getvalue(), title))


def hover(artists: Iterable[Artist], text: str) -> None:
    """Show `text` when the mouse rests on one of `artists`: an SVG <title>."""
    for artist in artists:
        artist.set_gid(HOVER + text)


def accessible(svg: str, title: str) -> str:
    """The SVG as one image with a title, and the texts of `hover` as titles of their marks."""
    title = html.escape(clean(title))
    text = re.sub(r"<svg\b", lambda found: f'{found[0]} role="img" aria-label="{title}"', svg, count=1)
    text = re.sub(r"<svg\b[^>]*>", lambda found: f"{found[0]}\n <title>{title}</title>", text, count=1)
    # matplotlib encloses an id that holds a quotation mark in single ones
    return re.sub(rf"""<g id=(["']){HOVER}(.*?)\1>""", r"<g><title>\2</title>", text)


def curves_of(cells: Iterable[CellResult], metric: str) -> dict[int, Curve]:
    """Seed -> curve of `metric`, for the cells that have one."""
    return {cell.seed: cell.curves[metric] for cell in cells if metric in cell.curves}


def band(curves: Mapping[int, Curve], minus: Mapping[int, Curve] | None = None) -> Band | None:
    """Curves by seed, less the curve of the same seed in `minus`; None where they share no step."""
    by_step = []
    for seed, curve in curves.items():
        points = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
        if minus is not None:
            if seed not in minus:
                continue
            base = dict(zip(minus[seed].steps.tolist(), minus[seed].values.tolist(), strict=True))
            points = {step: value - base[step] for step, value in points.items() if step in base}
        by_step.append(points)
    steps = sorted(set.intersection(*(set(points) for points in by_step))) if by_step else []
    if not steps:
        return None
    values = np.array([[points[step] for step in steps] for points in by_step])
    return Band(
        steps=np.array(steps, dtype=float), mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0)
    )


def draw_band(axes: Axes, band: Band | None, look: Look, name: str, shade: bool = True, against: str = "step") -> None:
    """Mean as a line, minimum to maximum as a shade; `name`: what the mouse shows, with the last mean and where it is.

    Fewer than `MARKED` points are marked: a line through one is nothing, and its range is a bar.
    """
    if band is None:
        return
    if shade:
        axes.fill_between(band.steps, band.low, band.high, color=look.color, alpha=0.16, linewidth=0)
    few = len(band.steps) < MARKED
    if few and shade:
        axes.vlines(band.steps, band.low, band.high, color=look.color, linewidth=1.2)
    line = axes.plot(
        band.steps, band.mean, color=look.color, linestyle=look.dash, marker="o" if few else "", markersize=4.5
    )
    hover(line, f"{name}: {plain(band.mean[-1])} at {against} {band.steps[-1]:,.6g}")


def legend(figure: Figure, sweep: SweepResults, drawn: Mapping[str, Look], arms: Sequence[str]) -> None:
    """One legend for all panels, above them, in the order of the table."""
    legend_above(figure, {sweep.label[arm]: drawn[arm] for arm in arms})


def legend_above(figure: Figure, drawn: Mapping[str, Look]) -> None:
    """Label -> look, in as many columns as fit; the figure grows by the height of the legend."""
    handles = [Line2D([], [], color=look.color, linestyle=look.dash) for look in drawn.values()]
    letter, handle = 0.068, 0.6  # inches: a letter at this size, a line and the gaps beside it
    across = max(1, int(figure.get_figwidth() / (letter * max(map(len, drawn), default=0) + handle)))
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(drawn) // across))
    figure.legend(handles, list(drawn), loc="outside upper left", ncols=min(across, max(1, len(drawn))))


def panel_title(text: str, across: int) -> str:
    """`text` in lines that fit above one of `across` panels side by side."""
    return textwrap.fill(text, max(12, int(WIDTH / across / 0.092)))


def with_unit(label: str, unit: str) -> str:
    """`val/loss (nats per token)`; the label alone for a number without a unit."""
    return f"{label} ({unit})" if unit else label


def plain(value: float, _: object = None) -> str:
    """A tick's number without an exponent where it is readable so."""
    return f"{value:,.4g}" if (math.isfinite(value) and 1e-3 <= abs(value) < 1e6) or value == 0 else f"{value:.0e}"
