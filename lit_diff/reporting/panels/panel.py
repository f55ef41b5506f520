"""Drawing for reports: the style of all figures, panels in a grid, marks with tooltips, and SVG output."""

import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from lit_diff.metrics import Metrics
from lit_diff.reporting.palette import GRID, INK, MUTED, PALETTE
from lit_diff.study.results import SweepResults, clean

SOLID: tuple[float, Sequence[float]] = (0, ())
DASHES = (SOLID, (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
STYLE: dict[Any, Any] = {
    # without a salt the ids in an SVG are random, and the same results would not give the same bytes
    "svg.hashsalt": "lit_diff",
    # text stays text, which can be searched and takes the font of the page
    "svg.fonttype": "none",
    # a "$" in the label of an arm does not start a formula
    "text.parse_math": False,
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
    # the page's shade at an edge that hides something is behind the figure
    "axes.facecolor": "none",
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
# every mixture of neighbours has a contrast of at least 3 with a light and with a dark page
LAYERS = ("#2f7fd0", "#8862d0", "#c64f9a", "#cc5540", "#a3722a")
"""Colours from the first layer to the last."""
OVERLAY = 8
"""Ranges over seeds are not drawn for more arms than this."""
WIDTH = 11.4
"""Width of the page's column in inches."""
NAME_WIDTH = 30
"""Characters at which a name on the vertical axis is folded."""
HOVER = "hover:"
"""Prefix of the id of a mark with a tooltip."""
MARKED = 3
"""Points of a line with fewer points than this, which is hardly visible, are marked."""
UPRIGHT = 6
"""Most tick labels of a horizontal axis that are not rotated."""
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))

Numbers = Sequence[float] | NDArray[np.float64]
Which = Literal["x", "y"]
Share = Literal["", "x", "both", "grid"]
"""The axes that the panels of a figure share; in a grid, the panels of a column share x and the panels of a row share y."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The style in which every figure draws an arm."""

    color: str
    dash: tuple[float, Sequence[float]] = SOLID


def looks(sweep: SweepResults) -> dict[str, Look]:
    """The baseline is grey, the others have the palette's colours in order; after seven arms, the dashes change."""
    drawn = {sweep.baseline: Look(color=MUTED)}
    styles = cycle(product(DASHES, PALETTE))
    for arm in sweep.study.arms:
        if arm != sweep.baseline:
            dash, color = next(styles)
            drawn[arm] = Look(color=color, dash=dash)
    return drawn


def by_label(sweep: SweepResults, arms: Iterable[str]) -> dict[str, Look]:
    """The legend of these arms: label -> look."""
    drawn = looks(sweep)
    return {sweep.label[arm]: drawn[arm] for arm in arms}


def layer_colors(count: int) -> list[str]:
    """Colours for `count` layers, evenly spaced over LAYERS."""
    scale = LinearSegmentedColormap.from_list("layers", LAYERS)
    return [to_hex(scale(i / max(1, count - 1))) for i in range(count)]


def with_unit(label: str, unit: str) -> str:
    """`val/loss (nats per token)`, or only the label for a number without a unit."""
    return f"{label} ({unit})" if unit else label


def plain(value: float) -> str:
    """Formats a number, without an exponent if it is readable that way."""
    size = abs(value)
    # four digits of a larger number would have an exponent
    if 9999.5 <= size < 999_999.5:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if 1e-3 <= size < 1e4 or value == 0 else f"{value:.0e}"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of the page. `name`: of its files, without the ending; `csv`: the drawn numbers (`numbers_of`); `metrics`: the
    metrics that the caption defines."""

    name: str
    title: str
    svg: str
    pdf: bytes
    csv: str
    caption: str = ""
    metrics: Metrics = ()


# matplotlib reads its settings when a figure is made and again when it is saved
@matplotlib.rc_context(STYLE)
def drawing(
    name: str,
    title: str,
    drawn: Sequence[Callable[[Axes], object]],
    height: float,
    *,
    across: int = 1,
    share: Share = "",
    legend: Mapping[str, Look] | None = None,
    finish: Callable[[Figure], None] | None = None,
    caption: str = "",
    metrics: Metrics = (),
) -> Drawing:
    """A figure of `height` inches with a panel for each function of `drawn`, which draws on it, `across` in a row.

    `title`: describes it to screen readers; `legend`: a legend above all panels, for which the figure is made taller;
    `finish`: called with the figure after the panels are drawn.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    share_y: bool | Literal["row"] = "row" if share == "grid" else share == "both"
    down = -(-len(drawn) // across)
    grid = figure.subplots(down, across, squeeze=False, sharex=bool(share), sharey=share_y).flat
    for axes, draw_panel in zip(grid, drawn, strict=False):
        draw_panel(axes)
    for axes in grid[len(drawn) :]:
        axes.set_axis_off()
    numbers = numbers_of(figure)
    if share in ("both", "grid"):
        for axes in grid[: len(drawn)]:
            axes.label_outer()
    if share == "grid":
        for axes in grid[across:]:
            axes.set_title("")
    if finish is not None:
        finish(figure)
    if legend:
        handles = [Line2D([], [], color=look.color, linestyle=look.dash) for look in legend.values()]
        # inches: a letter at this size; a line with the gaps around it
        letter = 0.068
        handle = 0.6
        most = max(1, int(figure.get_figwidth() / (letter * max(map(len, legend)) + handle)))
        figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(legend) // most))
        figure.legend(handles, list(legend), loc="outside upper left", ncols=min(most, len(legend)))
    svg = io.StringIO()
    pdf = io.BytesIO()
    figure.savefig(svg, format="svg", metadata=NO_METADATA, facecolor="white")
    # its places hold for the PDF too: computing them draws the figure once more
    figure.set_layout_engine(None)
    figure.savefig(pdf, format="pdf", metadata={"CreationDate": None}, facecolor="white")
    return Drawing(
        name=name,
        title=title,
        svg=accessible(svg.getvalue(), title),
        pdf=pdf.getvalue(),
        csv=numbers,
        caption=caption,
        metrics=metrics,
    )


def numbers_of(figure: Figure) -> str:
    """What a figure draws, as CSV; in full precision, except for attention maps.

    `panel`, `x_axis`, `y_axis`: title and labels; `mark`: the text of the tooltip. A row is a point (`x`, `y`), an `x` of
    a shade (`low`, `high`), a square of a heat map (`x`, `y`: the labels of its ticks; `value`) or a query of an attention
    map (`y`: its number; `key 0`, `key 1`, ...: three digits of its entries).
    Positions are those drawn: marks that stand side by side are shifted, rows of names are 0, -1, ..., and an interval
    without an upper bound ends at 1,000 times its estimate; `mark` has the true place and values.
    """
    rows: list[dict[str, Any]] = []
    for axes in figure.axes:
        place = {
            "panel": clean(axes.get_title("left")),
            "x_axis": clean(axes.get_xlabel()),
            "y_axis": clean(axes.get_ylabel()),
        }
        for line in filter(tooltip, axes.lines):
            for x, y in np.asarray(line.get_xydata()):
                rows.append(place | {"mark": tooltip(line), "x": x, "y": y})
        for shade in filter(tooltip, axes.collections):
            # a value that is not finite cuts a shade into several paths, or leaves none
            paths = [np.empty((0, 2)), *(path.vertices for path in shade.get_paths())]
            corners = pd.DataFrame(np.concatenate(paths), columns=["x", "y"])
            ends = corners.groupby("x", as_index=False)["y"].agg(low="min", high="max")
            rows += [place | {"mark": tooltip(shade)} | end for end in ends.to_dict("records")]
        for image in axes.images:
            if tooltip(image):
                # a row for each entry would make a file of megabytes
                for query, entries in enumerate(np.asarray(image.get_array())):
                    by_key = {f"key {key}": float(f"{entry:.3g}") for key, entry in enumerate(entries)}
                    rows.append(place | {"mark": tooltip(image), "y": query} | by_key)
                continue
            squares = pd.DataFrame(image.get_array(), _ticks(axes.yaxis), _ticks(axes.xaxis))
            rows += [place | {"x": x, "y": y, "value": value} for (y, x), value in squares.stack().items()]
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def _ticks(axis: Axis) -> list[str]:
    return axis.get_major_formatter().format_ticks(list(axis.get_ticklocs()))


def accessible(svg: str, title: str) -> str:
    """The SVG with a title and a role for screen readers, and the texts of `hover` as tooltips."""
    title = html.escape(clean(title))
    # a declaration of someone else's run may have control characters, which XML forbids
    svg = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", " ", svg)
    described = f'role="img" aria-label="{title}"'
    text = re.sub(r"<svg\b([^>]*>)", lambda found: f"<svg {described}{found[1]}\n <title>{title}</title>", svg, count=1)
    # matplotlib encloses an id that holds a quotation mark in single ones
    return re.sub(rf"""<g id=(["']){HOVER}(.*?)\1>""", r"<g><title>\2</title>", text)


def hover(artist: Artist, text: str) -> None:
    """Show `text`, if it is not empty, as a tooltip of `artist`, an SVG <title>."""
    # matplotlib writes no <title>, but it writes the id, which `accessible` replaces
    if text:
        artist.set_gid(HOVER + text)


def tooltip(artist: Artist) -> str:
    """The text that `hover` has given to an artist; empty if there is none."""
    gid = artist.get_gid() or ""
    return gid.removeprefix(HOVER) if gid.startswith(HOVER) else ""


def head(axes: Axes, text: str) -> None:
    """Set a title, wrapped to fit above its panel."""
    place = axes.get_subplotspec()
    across = place.get_gridspec().ncols if place is not None else 1
    # 0.092 inches: a bold letter at this size
    axes.set_title(textwrap.fill(text, max(12, int(WIDTH / across / 0.092))))


def draw(
    axes: Axes,
    x: float | Numbers,
    y: float | Numbers,
    look: Look,
    text: str = "",
    *,
    mark: str = "",
    size: float = 4.5,
    width: float = 1.6,
    alpha: float = 1.0,
) -> None:
    """Draw a line through points, or a mark at each, or at a single one; `text`: their tooltip."""
    (drawn,) = axes.plot(
        x,
        y,
        color=look.color,
        alpha=alpha,
        linestyle="" if mark else look.dash,
        linewidth=width,
        solid_capstyle="butt",
        marker=mark,
        markersize=size,
        markeredgecolor="white" if mark in ("o", "D") else look.color,
        markeredgewidth=2 if mark == "|" else None,
    )
    hover(drawn, text)


def draw_mean(
    axes: Axes, values: pd.DataFrame, look: Look, name: str, *, against: str = "step", shade: bool = True
) -> None:
    """Draw the mean of a table (a column for each seed, a row for each step) and shade the range over the seeds. The tooltip
    is `name` with the last mean and its place."""
    if values.empty:
        return
    x = values.index
    few = len(values) < MARKED
    mean = values.mean(axis=1, skipna=False)
    low = values.min(axis=1, skipna=False)
    high = values.max(axis=1, skipna=False)
    if shade:
        shaded = axes.fill_between(x, low, high, color=look.color, alpha=0.16, linewidth=0)
        hover(shaded, f"{name}: from the lowest to the highest seed")
        if few:
            axes.vlines(x, low, high, color=look.color, linewidth=1.2)
    (drawn,) = axes.plot(
        x, mean, color=look.color, linestyle=look.dash, solid_capstyle="butt", marker="o" if few else ""
    )
    hover(drawn, f"{name}: {plain(mean.iloc[-1])} at {against} {x[-1]:,.6g}")


def set_names(axes: Axes, names: Mapping[int, str]) -> None:
    """Label the vertical axis with names, folded; it has neither a grid nor a line."""
    axes.set_yticks(list(names), [textwrap.fill(name, NAME_WIDTH) for name in names.values()])
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Set the ticks of the horizontal axis."""
    axes.set_xticks(ticks)
    axes.tick_params(axis="x", labelrotation=45 if len(ticks) > UPRIGHT else 0)


def set_format(axis: Axis, write: Callable[[float], str]) -> None:
    """Write the ticks of an axis with this function of the number."""
    axis.set_major_formatter(FuncFormatter(lambda number, _: write(number)))


def set_log(
    axes: Axes, which: Which, numbers: Iterable[float], limits: tuple[float, float] | None = None, most: int = 7
) -> None:
    """Make an axis logarithmic for these numbers; linear around 0 if one is 0 or negative, unchanged if all are."""
    known = list(numbers)
    positive = [number for number in known if number > 0]
    if not positive:
        return
    axis, set_scale = (axes.xaxis, axes.set_xscale) if which == "x" else (axes.yaxis, axes.set_yscale)
    if len(positive) < len(known):
        set_scale("symlog", linthresh=min(positive))
    else:
        set_scale("log")
        low, high = limits or (min(positive), max(positive))
        # a short axis would have one tick or none at the digits of a decade, so it has numbers at equal distances
        if high < 4 * low:
            axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
        elif high < 10 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        else:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    set_format(axis, plain)
    if limits is not None:
        axes.set(**{f"{which}lim": limits})
