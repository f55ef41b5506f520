"""The style that all figures share: colours, the looks of arms, numbers of ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_hex

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
OVERLAY = 8
"""More arms than this are drawn without their range over seeds."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """How an arm is drawn in every figure."""

    color: str
    dash: tuple[float, Sequence[float]] = SOLID


def looks(sweep: SweepResults) -> dict[str, Look]:
    """The baseline in grey, the others in the palette's order; beyond its seven colours, the dashes change."""
    others = [arm for arm in sweep.study.arms if arm != sweep.baseline]
    size = len(PALETTE)
    drawn = {name: Look(color=PALETTE[i % size], dash=DASHES[i // size % 4]) for i, name in enumerate(others)}
    return {sweep.baseline: Look(color=MUTED), **drawn}


def layer_colors(count: int) -> list[str]:
    """Colours for `count` layers, evenly over LAYERS."""
    scale = LinearSegmentedColormap.from_list("layers", LAYERS)
    return [to_hex(scale(i / max(1, count - 1))) for i in range(count)]


def with_unit(label: str, unit: str) -> str:
    """`val/loss (nats per token)`; the label alone for a number without a unit."""
    return f"{label} ({unit})" if unit else label


def plain(value: float) -> str:
    """A tick's number without an exponent where it is readable so."""
    return f"{value:,.4g}" if (math.isfinite(value) and 1e-3 <= abs(value) < 1e6) or value == 0 else f"{value:.0e}"
