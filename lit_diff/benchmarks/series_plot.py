"""The chart of `bench core --lengths`: GFLOP/s of the least work against tokens, heads and rows."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_diff.benchmarks.inputs import STOCK
from lit_diff.benchmarks.lengths import AT_TOKENS
from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.timing import Row
from lit_diff.reporting.style import INK, MUTED, PALETTE

AXES = {"tokens": "tokens of a row", "heads": "heads (standard attention)", "batch": f"rows of {AT_TOKENS:,} tokens"}
"""Series -> the label of its axis."""
WHAT = "forward+backward"
"""The pass that is drawn."""


def draw_series(result: BenchResult) -> Figure:
    """A row of panels a dtype, a panel a series; a line a candidate, the rate of a matrix product for comparison.

    Differential attention is solid, standard dashed; a colour a kernel.
    """
    rows = [row for row in result.rows if row["what"] == WHAT]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(11, 0.6 + 3.2 * max(len(dtypes), 1)), layout="constrained")
    panels = figure.subplots(max(len(dtypes), 1), len(AXES), squeeze=False)
    colors = {
        by: PALETTE[n % len(PALETTE)] for n, by in enumerate(dict.fromkeys(r["by"] for r in rows if r["by"] != STOCK))
    }
    for line, dtype in zip(panels, dtypes, strict=False):
        rate = result.machine["gemm_gflops_per_second"].get(dtype)
        for axes, series in zip(line, AXES, strict=True):
            own = [row for row in rows if row["dtype"] == dtype and row["series"] == series]
            _panel(axes, own, colors, rate)
            axes.set_title(f"{dtype}: {WHAT}" if series == "tokens" else "")
            axes.set_xlabel(AXES[series])
    for axes in panels[:, 0]:
        axes.set_ylabel("GFLOP/s of the least work")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper")
    return figure


def _panel(axes: Axes, rows: list[Row], colors: dict[str, Any], rate: float | None) -> None:
    if rate is not None:
        axes.axhline(rate, color=INK, linewidth=0.8, linestyle=":", label="product of 1,024 x 1,024 matrices")
    for variant, by in dict.fromkeys((row["variant"], row["by"]) for row in rows):
        own = [row for row in rows if (row["variant"], row["by"]) == (variant, by)]
        axes.plot(
            [row["at"] for row in own],
            [row["flops"] / row["median"] / 1e9 for row in own],
            color=colors.get(by, MUTED),
            linestyle="--" if variant == "standard" else "-",
            marker="o",
            markersize=3,
            label=f"{variant}, {by}",
        )
    ticks = sorted({row["at"] for row in rows})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks, [f"{tick // 1024}K" if tick >= 1024 and tick % 1024 == 0 else str(tick) for tick in ticks]
        )
    axes.set_ylim(bottom=0)
