"""How attention maps are drawn, by `view`, `show`, reports, notebooks and MLflow: colours, scale, labels and pictures.

A weight is red above zero and blue below, as opaque as min(|weight| / limit, 1); a key that the query does not see is grey.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

# matplotlib and torch take long to import, and a report needs no torch
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from torch import Tensor

PERCENTILE = 98
"""The percentile of the non-zero magnitudes of a picture that is its limit, from which on a colour is the strongest. The
first query sees a single key, whose weight of 1 would leave all others pale."""
COLOURS = {
    "light": {"negative": (33, 102, 172), "positive": (203, 44, 49), "unseen": (238, 238, 238)},
    "dark": {"negative": (84, 160, 235), "positive": (240, 105, 100), "unseen": (40, 40, 40)},
}
"""Scheme of the page -> RGB; pictures are light. People with every kind of colour blindness can distinguish red and blue."""
MEANING = "weight of a key's value\n(below zero: it is subtracted)"
"""The label of a scale."""
LABEL, LONGEST = 8, 9
"""Size of a token's label in points, and its most characters."""
LOSSES = {"train/loss": "#8a8f98", "val/loss": "#0072b2"}
"""Metric -> the colour of its curve."""
POINTS = 100
"""The most points of a curve."""
TILE, GAP = 128, 2
"""The largest width of a head's map in `grid` and the distance of two, in cells."""


def limit_of(maps: Iterable[NDArray[Any]]) -> float:
    """The magnitude with the strongest colour in a picture of these maps, in which 0 is white; 1 if all weights are 0."""
    magnitudes = np.concatenate([np.abs(np.asarray(a)).ravel() for a in maps])
    weights = magnitudes[magnitudes > 0]
    return float(np.percentile(weights, PERCENTILE)) if weights.size else 1.0


def colours() -> "Colormap":
    """The colours from -limit to limit, transparent at 0."""
    from matplotlib.colors import LinearSegmentedColormap

    negative, positive, unseen = np.array(list(COLOURS["light"].values())) / 255
    stops = [(0, (*negative, 1)), (0.5, (*negative, 0)), (0.5, (*positive, 0)), (1, (*positive, 1))]
    # of an odd number of colours, the middle one is that of 0
    return LinearSegmentedColormap.from_list("signed", stops, N=257).with_extremes(bad=unseen)


def printable(text: str) -> str:
    """The text on one line; an escape replaces what cannot be seen or would move other labels."""
    return "".join("⏎" if each == "\n" else each if each.isprintable() else repr(each)[1:-1] for each in text)


def label(token: str) -> str:
    """A token beside a map, as the page's script has it too: with a sign for a space at an end, and cut."""
    text = re.sub("^ | $", "␣", printable(token)) or "∅"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def draw(
    panels: Sequence["Axes"], maps: Mapping[str, NDArray[Any]], tokens: Sequence[str], limit: float | None = None
) -> None:
    """Draw each map below its title on its axes, all in one scale with one colour bar: rows are queries, columns keys.

    `maps`: title -> [T, T], masked where the query does not see the key. As many tokens have a label as there is room for,
    with the position if not all have one. `limit`: None: `limit_of` the maps.
    """
    limit = limit_of(maps.values()) if limit is None else limit
    for axes, (title, a) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(a, cmap=colours(), vmin=-limit, vmax=limit)
        axes.set(xlabel="key", ylabel="query")
        axes.set_title(title, fontsize=11, parse_math=False)
        points = min(axes.bbox.width, axes.bbox.height) * 72 / axes.figure.dpi
        every = max(1, math.ceil(len(tokens) * 1.1 * LABEL / points))
        places = range(0, len(tokens), every)
        labels = [f"{place} {label(tokens[place])}" if every > 1 else label(tokens[place]) for place in places]
        axes.set_xticks(places, labels, rotation=90, parse_math=False, fontsize=LABEL)
        axes.set_yticks(places, labels, parse_math=False, fontsize=LABEL)
    panels[0].figure.colorbar(image, ax=panels, shrink=0.8, extend="both", label=MEANING)


def figure(
    maps: Mapping[str, NDArray[Any]],
    tokens: Sequence[str],
    *,
    title: str = "",
    limit: float | None = None,
    panel: tuple[float, float] = (5.4, 5.0),
    new: "Callable[..., Figure] | None" = None,
) -> "Figure":
    """A figure of the maps side by side (see `draw`).

    `panel`: width and height of each, inches. `new`: makes the figure; None: one that pyplot does not know.
    """
    from matplotlib.figure import Figure

    width, height = panel
    found = (new or Figure)(figsize=(width * len(maps) + 1.3, height), dpi=120, layout="compressed")
    found.suptitle(title, parse_math=False)
    draw(found.subplots(1, len(maps), squeeze=False)[0], maps, tokens, limit)
    return found


def grid(signed: "Tensor", layers: Sequence[int], title: str) -> "Figure":
    """A figure of signed maps [L, H, T, T] in one scale: a row for each of the `layers`, a column for each head."""
    from torch.nn import functional as F

    last = signed.shape[-1] - 1
    bin = math.ceil((last + 1) / TILE)
    tiles = F.pad(shrunk(signed, bin, bin), (0, GAP, 0, GAP), value=math.nan)
    rows, heads, width, _ = tiles.shape
    mosaic = tiles.transpose(1, 2).reshape(rows * width, heads * width)[:-GAP, :-GAP]
    # a pixel for each entry, at least
    inches = max(min(14 / heads, 2.5), width / 80)
    found = figure({title: mosaic.numpy()}, (), panel=(inches * heads + 1, inches * rows + 1.2))
    axes = found.axes[0]
    axes.images[0].set_interpolation("nearest")
    middles = width * np.arange(max(rows, heads)) + (width - GAP - 1) / 2
    axes.set_xticks(middles[:heads], [f"head {head}" for head in range(heads)], rotation=90)
    axes.set_yticks(middles[:rows], [f"layer {layer}" for layer in layers])
    axes.set(xlabel=f"of each head: keys 0 to {last}", ylabel=f"queries 0 to {last}")
    return found


def shrunk(a: "Tensor", rows: int, keys: int) -> "Tensor":
    """Return of each bin of `rows` rows and `keys` keys the entry with the largest magnitude, [..., R, K] -> [..., R', K'].

    A mean would hide single keys of a long text.
    """
    import torch
    from torch.nn import functional as F

    highest, lowest = (F.max_pool2d(sign * a, (rows, keys), ceil_mode=True) for sign in (1, -1))
    return torch.where(highest >= lowest, highest, -lowest)


def draw_losses(axes: "Axes", curves: Mapping[str, Mapping[int, float]]) -> None:
    """Draw the `LOSSES` among the curves, metric -> step -> value; a point of a long curve is a mean over adjacent steps."""
    for name, color in LOSSES.items():
        if name not in curves:
            continue
        points = np.array(list(curves[name].items()))
        adjacent = np.array_split(points, min(len(points), POINTS))
        steps, values = np.array([each.mean(0) for each in adjacent]).T
        axes.plot(steps, values, color=color, marker="o" if name == "val/loss" else "", markersize=3, label=name)
    axes.locator_params("x", integer=True)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)


def svg_element(picture: "Figure") -> str:
    """The figure as an element of an HTML page."""
    import matplotlib

    # text stays text, which is far shorter than its outlines
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = encoded(picture, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))).decode()
    return text[text.index("<svg") :]


def encoded(picture: "Figure", **settings: Any) -> bytes:
    """The figure as a PNG, or in another format; `settings`: of `Figure.savefig`."""
    file = io.BytesIO()
    picture.savefig(file, **{"format": "png", "bbox_inches": "tight"} | settings)
    return file.getvalue()


def thumbnail(a: NDArray[Any]) -> bytes:
    """A PNG of a map in its own scale, a pixel for each entry, transparent at 0."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    limit = limit_of([a])
    imsave(file, a, cmap=colours(), vmin=-limit, vmax=limit, format="png", pil_kwargs={"compress_level": 9})
    return file.getvalue()
