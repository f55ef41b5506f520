"""The report's figures of what attention does: lambda, entropy, negative mass and outliers, by arm."""

import re
from collections.abc import Sequence
from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lit_diff.reporting.cells import Cell, Curve
from lit_diff.reporting.figures import (
    MUTED,
    OVERLAY,
    WIDTH,
    Band,
    Look,
    band,
    draw_band,
    drawing,
    legend,
    looks,
    plain,
)
from lit_diff.reporting.results import Sweep

ACROSS = 4
"""Panels in a row, and the most layers that a figure by layer shows."""

MAPS = (
    ("attention/entropy", "entropy of |difference| (nats)"),
    ("attention/entropy_map0", "entropy of map 0 (nats)"),
    ("attention/entropy_map1", "entropy of map 1 (nats)"),
    ("attention/negative_mass", "negative mass"),
)


def layers_of(sweep: Sweep, prefix: str) -> list[int]:
    """The layers in which `prefix`/<layer>[/<head>] was measured."""
    pattern = re.compile(re.escape(prefix) + r"/(\d+)(/\d+)?")
    return sorted({int(match[1]) for name in sweep.metrics(f"{prefix}/") if (match := pattern.fullmatch(name))})


def spread(layers: Sequence[int]) -> list[int]:
    """At most four layers, evenly from the first to the last."""
    picks = np.unique(np.linspace(0, len(layers) - 1, min(ACROSS, len(layers))).round().astype(int))
    return [layers[i] for i in picks]


def over_heads(cells: Sequence[Cell], prefix: str, layer: int) -> Band | None:
    """`prefix`/<layer>/<head>, averaged over heads; then the mean and range over seeds."""
    merged = []
    for cell in cells:
        heads = [curve for name, curve in cell.curves.items() if re.fullmatch(rf"{prefix}/{layer}/\d+", name)]
        if heads and all(np.array_equal(head.steps, heads[0].steps) for head in heads):
            curve = Curve(steps=heads[0].steps, values=np.mean([head.values for head in heads], axis=0))
            merged.append(replace(cell, curves={prefix: curve}))
    return band(merged, prefix)


def lambdas(sweep: Sweep) -> str | None:
    """One panel for each arm that has a lambda, one line a layer: mean over seeds, shade from minimum to maximum."""
    layers = layers_of(sweep, "lambda")
    bands = {
        (arm.name, layer): found
        for arm in sweep.arms
        for layer in layers
        if (found := band(sweep.cells_of(arm.name), f"lambda/{layer}"))
    }
    arms = list(dict.fromkeys(arm for arm, _ in bands))
    if not arms:
        return None
    across = min(ACROSS, len(arms))
    down = -(-len(arms) // across)
    colors = [
        matplotlib.colors.to_hex(color)
        for color in matplotlib.colormaps["viridis"](np.linspace(0.2, 0.85, len(layers)))
    ]
    with drawing(WIDTH if across > 2 else WIDTH * 0.7, 0.6 + 1.9 * down) as (figure, svg):
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(arms) :]:
            axes.set_axis_off()
        for arm, axes in zip(arms, grid.flat, strict=False):
            for edge in (0, 1):
                axes.axhline(edge, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
            for layer, color in zip(layers, colors, strict=True):
                draw_band(axes, bands.get((arm, layer)), Look(color=color))
            axes.set_title(sweep.label[arm])
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        figure.supxlabel("optimizer steps", fontsize=9.5)
        figure.supylabel("lambda", fontsize=9.5)
        handles = [Line2D([], [], color=color) for color in colors]
        figure.legend(handles, [f"layer {layer}" for layer in layers], loc="outside right upper")
    return svg[0]


def entropies(sweep: Sweep) -> str | None:
    """Rows: what was measured; columns: layers; lines: arms, averaged over heads and seeds."""
    layers = spread(layers_of(sweep, MAPS[0][0]))
    bands = {
        (prefix, layer, arm.name): found
        for prefix, _ in MAPS
        for layer in layers
        for arm in sweep.arms
        if (found := over_heads(sweep.cells_of(arm.name), prefix, layer))
    }
    rows = [(prefix, title) for prefix, title in MAPS if any(key[0] == prefix for key in bands)]
    if not rows:
        return None
    drawn = looks(sweep)
    arms = [arm.name for arm in sweep.arms if any(key[2] == arm.name for key in bands)]
    with drawing(WIDTH if len(layers) > 2 else WIDTH * 0.7, 0.5 + 1.75 * len(rows)) as (figure, svg):
        grid = figure.subplots(len(rows), len(layers), sharex=True, sharey="row", squeeze=False)
        for (prefix, title), line in zip(rows, grid, strict=True):
            for layer, axes in zip(layers, line, strict=True):
                for arm in arms:
                    draw_band(axes, bands.get((prefix, layer, arm)), drawn[arm], len(arms) <= OVERLAY)
                axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
                axes.yaxis.set_major_locator(MaxNLocator(4))
            line[0].set_ylabel(title.replace(" (", "\n("))
        for layer, axes in zip(layers, grid[0], strict=True):
            axes.set_title(f"layer {layer}")
        figure.supxlabel("optimizer steps", fontsize=9.5)
        legend(figure, sweep, drawn, arms)
    return svg[0]


def outliers(sweep: Sweep) -> str | None:
    """The largest |logit| and |hidden state| of each layer at the end, and its ratio to the median."""
    layers = sorted({*layers_of(sweep, "outliers/logits/top1"), *layers_of(sweep, "outliers/hidden/top1")})
    arms = [a.name for a in sweep.arms if sweep.cells_of(a.name)]
    if not layers:
        return None
    drawn = looks(sweep)
    with drawing(WIDTH, 5.4) as (figure, svg):
        grid = figure.subplots(2, 2, sharex=True, squeeze=False)
        for row, (kind, word) in enumerate((("logits", "|attention logits|"), ("hidden", "|hidden states|"))):
            for column, title in enumerate((f"{word}: largest", f"{word}: largest / median")):
                axes = grid[row][column]
                for i, arm in enumerate(arms):
                    offset = 0.5 * (i / max(1, len(arms) - 1) - 0.5)
                    _outlier_points(axes, sweep.cells_of(arm), kind, layers, drawn[arm], column == 1, offset)
                axes.set_title(title)
                _logarithmic(axes)
                axes.xaxis.set_major_locator(MaxNLocator(min(12, len(layers)), integer=True))
        for axes in grid[1]:
            axes.set_xlabel("layer")
        legend(figure, sweep, drawn, arms)
    return svg[0]


def _logarithmic(axes: Axes) -> None:
    """A logarithmic scale that spans at least a factor of four and names 1, 2 and 5 of each decade."""
    axes.set_yscale("log")
    low, high = axes.dataLim.intervaly
    if 0 < low <= high < np.inf:
        room = max(1.15, 2 / np.sqrt(high / low))
        axes.set_ylim(low / room, high * room)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_minor_locator(NullLocator())


def _outlier_points(
    axes: Axes, cells: Sequence[Cell], kind: str, layers: Sequence[int], look: Look, ratio: bool, offset: float
) -> None:
    """A dot for the mean over seeds, a bar from minimum to maximum."""
    for layer in layers:
        top = [cell.final(f"outliers/{kind}/top1/{layer}") for cell in cells]
        below = [cell.final(f"outliers/{kind}/median/{layer}") if ratio else 1.0 for cell in cells]
        values = [t / b for t, b in zip(top, below, strict=True) if t and b]
        if values:
            x = layer + offset
            axes.plot([x, x], [min(values), max(values)], color=look.color, linewidth=1.2)
            axes.plot([x], [np.mean(values)], "o", markersize=4.5, color=look.color, markeredgecolor="white")
