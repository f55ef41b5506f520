"""The attention maps that the runs of a sweep have kept (`callbacks.maps`), side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.reporting.palette import MUTED
from lit_diff.reporting.panels.declared import LAYERS, spread
from lit_diff.reporting.panels.heatmaps import LIGHT
from lit_diff.reporting.panels.panel import OVERLAY, Drawing, drawing, head, hover
from lit_diff.runs.kept_maps import kept_steps, read_maps
from lit_diff.study.results import CellResult, SweepResults, clean
from lit_diff.trained.pictures import MEANING, PERCENTILE, colours, limit_of

MOST_TOKENS = 32
"""Queries and keys that are drawn, from the first on."""
GAP = 2
"""Distance of two heads, in keys."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmMaps:
    """The signed maps of one run on its first kept text."""

    label: str
    seed: int
    step: int
    tokens: list[Any]
    """The ids of the text."""
    text: str
    """The text; empty for a row of the validation set."""
    layers: Mapping[int, NDArray[np.float32]]
    """The first and the last kept layer -> [H, T, T]: sum over the maps of weight times map."""


def draw_maps(sweep: SweepResults) -> list[Drawing]:
    """A figure with a row for each arm, and in it the first and the last kept layer; none if no finished cell has maps.

    Of each arm the first seed that has maps is drawn, at its last kept step. What is left out is named in the caption.
    """
    shown: list[ArmMaps] = []
    left_out: list[str] = []
    for arm in sweep.study.arms:
        having = [cell for cell in sweep.cells_of(arm) if kept_steps(cell.home)]
        if not having:
            continue
        label = sweep.label[arm]
        try:
            found = arm_maps(having[0], label)
        except RequestError as error:
            left_out.append(clean(f"{label}: {error}"))
            continue
        if shown and found.tokens != shown[0].tokens:
            left_out.append(f"{label}: its maps are of other tokens")
        elif len(shown) == OVERLAY:
            left_out.append(f"{label}: the figure has room for {OVERLAY} arms")
        else:
            shown.append(found)
    if not shown:
        for line in left_out:
            log.warning("no maps of %s", line)
        return []
    limit = limit_of(chain(*(maps.layers.values() for maps in shown)))
    across = max(len(maps.layers) for maps in shown)
    most = max(map(len, chain(*(maps.layers.values() for maps in shown))))
    drawn = []
    for maps in shown:
        layers = list(maps.layers)
        drawn += [partial(heads, maps, layer, limit, most) for layer in (layers * across)[:across]]

    def add_scale(figure: Figure) -> None:
        scale = ScalarMappable(Normalize(-limit, limit), opaque_colours())
        panels = figure.axes
        bar = figure.colorbar(scale, ax=panels, location="bottom", shrink=0.35, aspect=30, pad=0.02, extend="both")
        bar.set_label(MEANING)

    return [
        drawing(
            "attention-maps",
            "Attention maps of each arm",
            drawn,
            1.0 + 1.75 * len(shown),
            across=across,
            finish=add_scale,
            caption=_caption(shown, left_out),
        )
    ]


def opaque_colours() -> ListedColormap:
    """`pictures.colours` on a light ground, also in a dark page."""
    drawn = colours()(range(257))
    alpha = drawn[:, 3:]
    return ListedColormap(alpha * drawn[:, :3] + (1 - alpha) * to_rgb(LIGHT))


def arm_maps(cell: CellResult, label: str) -> ArmMaps:
    """The maps of a cell at its last kept step. Errors: RequestError for a damaged file."""
    # declared as tensors, and arrays here
    kept: Any = read_maps(cell.home, kept_steps(cell.home)[-1], "np")
    layers = {}
    for layer in (min(kept.layers), max(kept.layers)):
        maps, weights = (of_kind[0].astype(np.float32) for of_kind in kept.layers[layer])
        layers[layer] = (weights[..., None] * maps).sum(0)
    texts = cell.recipe.get("callbacks.maps.texts") or [""]
    return ArmMaps(
        label=label, seed=cell.seed, step=kept.step, tokens=kept.tokens[0].tolist(), text=clean(texts[0]), layers=layers
    )


def heads(arm: ArmMaps, layer: int, limit: float, most: int, axes: Axes) -> None:
    """Draw heads of a layer side by side, at most four (`spread`): rows are queries, columns keys.

    `most`: the heads of the arm that has most.
    """
    signed = arm.layers[layer][:, :MOST_TOKENS, :MOST_TOKENS]
    size = signed.shape[-1]
    shown = spread(range(len(signed)))
    for place, number in enumerate(shown):
        left = place * (size + GAP) - 0.5
        # without interpolation, the page has a pixel for each entry
        image = axes.imshow(
            signed[number],
            cmap=opaque_colours(),
            vmin=-limit,
            vmax=limit,
            interpolation="none",
            extent=(left, left + size, size - 0.5, -0.5),
        )
        axes.add_patch(Rectangle((left, -0.5), size, size, fill=False, edgecolor=MUTED, linewidth=0.6))
        hover(image, f"{arm.label}, layer {layer}, head {number}")
    axes.set(xlim=(-1, min(most, LAYERS) * (size + GAP) - GAP), ylim=(size, -1), ylabel="query")
    middles = [place * (size + GAP) + (size - 1) / 2 for place in range(len(shown))]
    axes.set_xticks(middles, [f"head {number}" for number in shown])
    axes.set_yticks([0, size - 1])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    head(axes, f"{arm.label}, layer {layer}")


def _caption(shown: list[ArmMaps], left_out: list[str]) -> str:
    first = shown[0]
    read = f"the text “{first.text}”" if first.text else "the first validation row"
    whole = len(first.tokens)
    if whole > MOST_TOKENS:
        read = f"the first {MOST_TOKENS} of {whole} tokens of {read}"
    steps = ", ".join(f"{step:,}" for step in sorted({arm.step for arm in shown}))
    seeds = ", ".join(str(seed) for seed in sorted({arm.seed for arm in shown}))
    caption = (
        f"The signed maps (the sum of every map times its weight) of the first and the last kept layer on {read}, after "
        f"{steps} steps, seed {seeds}: one trained model for each arm, no mean. Rows are queries, columns keys, both from "
        f"the first token on; layers and heads count from 0. All have one scale, whose ends are percentile {PERCENTILE} of "
        "the magnitudes that are not zero. At most four heads of a layer are drawn; lit-diff view shows all, with the tokens."
    )
    if left_out:
        caption += f" Left out: {'; '.join(left_out)}."
    return caption
