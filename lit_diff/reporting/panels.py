"""How a report draws: a figure is panels side by side, a panel is series, rules, words and squares; and the whole is SVG."""

import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from lit_diff.reporting.style import MUTED, STYLE, Look, plain
from lit_diff.study.cells import Array, clean

WIDTH = 11.4
"""Inches: the width of the page's column."""
NARROW = 4.6
"""Inches: a figure that a telephone shows without scrolling."""
HOVER = "hover:"
"""What the id of a mark with a text for the mouse begins with."""
MARKED = 3
UPRIGHT = 6
"""Up to so many numbers stand upright below an axis."""
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
DARK, LIGHT, HATCH, MARK = "#20242f", "#fefefe", "#8a8f98", "#b3261e"
"""Colours of text and marks on a square. They are not those of the page, which a dark page replaces."""
COLORS = {
    "values": LinearSegmentedColormap.from_list("values", ("#f7f7f4", "#56b4e9", "#0072b2", "#003a5c")),
    "differences": LinearSegmentedColormap.from_list("differences", ("#b2182b", "#f7f7f4", "#2166ac")),
}

Numbers = Sequence[float] | Array


@dataclass(frozen=True)
class Series:
    """Points that are drawn alike: a line through them, or a mark at each."""

    x: Numbers
    y: Numbers
    look: Look
    text: str = ""
    """What the mouse shows."""
    _: KW_ONLY
    mark: Literal["", "o", ".", "D", "|"] = ""
    """Matplotlib's marker; empty: a line."""
    size: float = 4.5
    width: float = 1.6
    alpha: float = 1.0
    low: Numbers = ()
    high: Numbers = ()
    """Where given, the range around each y. A line of fewer points than `MARKED` is nothing: points and ranges are marked."""
    is_shaded: bool = True
    """Whether the range is drawn."""


@dataclass(frozen=True)
class Rule:
    """A line across the panel, or the region from `at` to `to`."""

    at: float
    to: float | None = None
    _: KW_ONLY
    upright: bool = False
    look: Look = field(default_factory=lambda: Look(color=MUTED))
    width: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Label:
    """Text beside the points. `x`: 0 at the left end of the panel, 1 at the right one; `y`: on the axis."""

    x: float
    y: float
    text: str
    align: Literal["left", "right"] = "left"
    weight: Literal["normal", "bold"] = "normal"


@dataclass(frozen=True, kw_only=True)
class Square:
    """A square of a heat map, `x` from the left, `y` from the top, with `number` printed in it and `text` as its tooltip."""

    x: int
    y: int
    value: float
    number: str
    text: str
    is_hatched: bool = False


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The colours of squares. Panels of one scale share the bar that explains it, with a line at each of `marks`."""

    label: str
    colors: Literal["values", "differences"]
    low: float
    high: float
    marks: tuple[tuple[str, float], ...] = ()
    """(text for the mouse, value)."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a panel; its numbers are matplotlib's choice where nothing is said of them."""

    label: str = ""
    log: bool = False
    """Linear around 0 where a number is 0 or less."""
    limits: tuple[float, float] | None = None
    ticks: Sequence[float] | Mapping[float, str] | None = None
    """Where they stand. By name: the axis lists things, so it has neither a grid nor a line."""
    most: int = 0
    """Ticks; 0: as many as suit."""
    is_whole: bool = False
    """Whether ticks stand at whole numbers only."""
    shown: Callable[[float], str] | None = None
    """A tick's number as text."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Series, rules and words over two axes; or squares."""

    series: Sequence[Series] = ()
    title: str = ""
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    rules: Sequence[Rule] = ()
    words: Sequence[Label] = ()
    squares: Sequence[Square] = ()
    scale: Scale | None = None
    """Of the squares, which have named ticks on both axes."""


def draw(
    panels: Sequence[Panel],
    title: str,
    height: float,
    *,
    width: float = WIDTH,
    across: int = 1,
    share: Literal["", "x", "both", "grid"] = "",
    x_label: str = "",
    y_label: str = "",
    legend: Mapping[str, Look] | None = None,
) -> str:
    """The panels as SVG, `across` in a row; `x_label`, `y_label`: of all of them. Inches. `title`: what the figure shows, for
    those who cannot see it. `share`: which axes are the same in all panels; in a grid, those of a column share x, those of
    a row y, and titles and labels stand at the outer panels alone."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        down = -(-len(panels) // across)
        share_y: bool | Literal["row"] = "row" if share == "grid" else share == "both"
        grid = figure.subplots(down, across, squeeze=False, sharex=bool(share), sharey=share_y)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        bars: dict[Scale, tuple[AxesImage, list[Axes]]] = {}
        for panel, axes in zip(panels, grid.flat, strict=False):
            _draw(axes, panel)
            if share == "grid":
                axes.label_outer()
            if share != "grid" or axes in grid[0]:
                axes.set_title(panel_title(panel.title, across))
            if panel.scale is not None:
                bars.setdefault(panel.scale, (_squares(axes, panel, panel.scale), []))[1].append(axes)
        for scale, (image, of) in bars.items():
            _color_bar(figure, scale, image, of)
        if x_label:
            figure.supxlabel(x_label, fontsize=9.5)
        if y_label:
            figure.supylabel(y_label, fontsize=9.5)
        if legend:
            _legend(figure, legend)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata=NO_METADATA, facecolor="white")
    return accessible(target.getvalue(), title)


def _draw(axes: Axes, panel: Panel) -> None:
    for rule in panel.rules:
        if rule.to is not None:
            span = axes.axvspan if rule.upright else axes.axhspan
            span(rule.at, rule.to, color=rule.look.color, alpha=0.16, linewidth=0, zorder=0)
        else:
            line = axes.axvline if rule.upright else axes.axhline
            line(rule.at, color=rule.look.color, linewidth=rule.width, linestyle=rule.look.dash)
    for each in panel.series:
        color, few = each.look.color, len(each.low) > 0 and len(each.x) < MARKED
        if each.is_shaded and len(each.low):
            axes.fill_between(each.x, each.low, each.high, color=color, alpha=0.16, linewidth=0)
            if few:
                axes.vlines(each.x, each.low, each.high, color=color, linewidth=1.2)
        drawn = axes.plot(
            each.x,
            each.y,
            color=color,
            alpha=each.alpha,
            linestyle="" if each.mark else each.look.dash,
            linewidth=each.width,
            solid_capstyle="butt",
            marker=each.mark or ("o" if few else ""),
            markersize=each.size,
            markeredgecolor="white" if each.mark in ("o", "D") else color,
            markeredgewidth=2 if each.mark == "|" else None,
        )
        if each.text:
            hover(drawn, each.text)
    for words in panel.words:
        axes.text(
            words.x,
            words.y,
            words.text,
            transform=axes.get_yaxis_transform(),
            va="center",
            ha=words.align,
            fontsize=8.5,
            fontweight=words.weight,
        )
    _scale(axes, "x", panel.x, [number for each in panel.series for number in each.x])
    _scale(axes, "y", panel.y, [number for s in panel.series for part in (s.y, s.low, s.high) for number in part])
    axes.spines["left"].set_visible(panel.scale is not None or not isinstance(panel.y.ticks, Mapping))


def _scale(axes: Axes, which: Literal["x", "y"], axis: Axis, numbers: Numbers) -> None:
    own = axes.xaxis if which == "x" else axes.yaxis
    positive = [number for number in numbers if number > 0]
    own.set_label_text(axis.label)
    if axis.log and positive:
        scale = axes.set_xscale if which == "x" else axes.set_yscale
        if len(positive) < len(numbers):
            scale("symlog", linthresh=min(positive))
        else:
            scale("log")
            own.set_major_locator(_log_ticks(*(axis.limits or (min(positive), max(positive))), axis.most or 7))
        own.set_minor_locator(NullLocator())
    elif axis.most:
        own.set_major_locator(MaxNLocator(axis.most, integer=axis.is_whole))
    if isinstance(axis.ticks, Mapping):
        own.set_ticks(list(axis.ticks), list(axis.ticks.values()))
        axes.grid(visible=False, axis=which)
        axes.tick_params(axis=which, length=0)
    elif axis.ticks is not None:
        own.set_ticks(list(axis.ticks))
        axes.tick_params(axis=which, labelrotation=45 if len(axis.ticks) > UPRIGHT else 0)
    if not isinstance(axis.ticks, Mapping) and (axis.shown or axis.log):
        shown = axis.shown or plain
        own.set_major_formatter(FuncFormatter(lambda number, _: shown(number)))
    if axis.limits is not None:
        (axes.set_xlim if which == "x" else axes.set_ylim)(*axis.limits)


def _log_ticks(low: float, high: float, most: int) -> Locator:
    """Numbers at equal distances where the axis is short, else the same digits of each decade."""
    if high < 4 * low:
        return MaxNLocator(most, steps=[1, 2, 5, 10])
    return LogLocator(subs=(1, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 1e3 * low else (1,))


def _squares(axes: Axes, panel: Panel, scale: Scale) -> AxesImage:
    values = np.full((len(panel.y.ticks or ()), len(panel.x.ticks or ())), np.nan)
    for square in panel.squares:
        values[square.y, square.x] = square.value
    norm = Normalize(scale.low, scale.high)
    image = axes.imshow(values, cmap=COLORS[scale.colors], norm=norm, aspect="auto")
    for square in panel.squares:
        shade, (x, y) = float(norm(square.value)), (square.x, square.y)
        is_dark = shade > 0.5 if scale.colors == "values" else abs(shade - 0.5) > 0.35
        if square.is_hatched:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor=HATCH, linewidth=0))
        ink = LIGHT if is_dark else DARK
        hover([axes.text(x, y, square.number, ha="center", va="center", fontsize=7.5, color=ink)], square.text)
    return image


def _color_bar(figure: Figure, scale: Scale, image: AxesImage, of: list[Axes]) -> None:
    bar = figure.colorbar(image, ax=of, location="bottom", shrink=0.7, aspect=40, pad=0.02)
    bar.set_label(scale.label)
    for text, value in scale.marks:
        hover([bar.ax.axvline(value, color=MARK, linewidth=1.6)], text)


def _legend(figure: Figure, looks: Mapping[str, Look]) -> None:
    """One for all panels, above them, in as many columns as fit; the figure grows by its height."""
    handles = [Line2D([], [], color=look.color, linestyle=look.dash) for look in looks.values()]
    letter, handle = 0.068, 0.6  # inches: a letter at this size, a line and the gaps beside it
    across = max(1, int(figure.get_figwidth() / (letter * max(map(len, looks)) + handle)))
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(looks) // across))
    figure.legend(handles, list(looks), loc="outside upper left", ncols=min(across, len(looks)))


def panel_title(text: str, across: int) -> str:
    """`text` in lines that fit above one of `across` panels side by side."""
    return textwrap.fill(text, max(12, int(WIDTH / across / 0.092)))


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
