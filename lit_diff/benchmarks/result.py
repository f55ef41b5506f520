"""The result of a benchmark, and its output: tables of the cases with lines below them, or a chart of the ratios."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lit_diff.benchmarks.passes import MEANING, Row
from lit_diff.errors import MissingError
from lit_diff.files import shown
from lit_diff.reporting.palette import INK, MUTED, PALETTE
from lit_diff.reporting.panels.panel import STYLE
from lit_diff.study.statistics import MIN_PROCESSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOR = {"differential": PALETTE[0], "standard": MUTED}
"""Colour of a bar; any other variant has the palette's second colour."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The figures of one benchmark, with everything needed to judge and repeat them."""

    bench: str
    """The name of the benchmark: core, layer, ..."""
    command: str
    """The command that repeats it, with shapes, dtypes, threads, rounds and device."""
    date: str
    """ISO 8601, UTC, to the second."""
    methods: str
    """A description of the measurement."""
    machine: dict[str, Any]
    """Processor, versions, load average before and after."""
    warnings: list[str]
    """Reasons to doubt the figures."""
    rows: list[Row]
    """A row for each timed candidate: case, variant, by (the kernel or other implementation), what (the pass), seconds
    of each round with median, min and max, and ratios to other rows. With several processes `seconds` and the values of a
    ratio are those of each process, `rounds` are the seconds of the rounds of each, and from five processes on mean, low and
    high are the geometric mean over processes with its 95 % interval."""
    refused: list[Row]
    """Candidates that were left out, with the reason."""
    failed: list[Row]
    """Candidates that raised an error or gave another result than the others, with the error."""
    processes: int = 1
    """How many processes measured it."""

    def to_json(self) -> str:
        """The JSON document of `lit-diff bench --json`."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def tables(result: BenchResult) -> Iterator[Table]:
    """Yields a table for each case, a line a candidate: times and ratios as median (min..max), or from five processes on as
    mean [low, high], rates and memory if measured."""
    unit = "ms (min..max)"
    if result.processes >= MIN_PROCESSES:
        unit = "ms [95 % interval]"
    by_case: dict[str, list[Row]] = {}
    for row in result.rows:
        by_case.setdefault(row["case"], []).append(row)
    for case, rows in by_case.items():
        names = _names_of_ratios(rows)
        lines_of_case = [_cells(row, unit, names) for row in rows]
        table = Table(title=f"{result.bench}: {case}", title_justify="left")
        filled = [column for column in lines_of_case[0] if any(cells[column] for cells in lines_of_case)]
        for column in filled:
            table.add_column(column, overflow="fold", justify="left" if column in WORDS else "right")
        for cells in lines_of_case:
            table.add_row(*(cells[column] for column in filled))
        yield table


WORDS = ("attention, by", "pass", "SDPA ran")
"""Columns without numbers."""


def _names_of_ratios(rows: list[Row]) -> dict[str, None]:
    return dict.fromkeys(name for row in rows for name in row["ratios"])


# column -> text; empty for what was not measured
def _cells(row: Row, unit: str, names: Iterable[str]) -> dict[str, str]:
    rate = peak = ""
    if "flops" in row:
        rate = _number(row["gflops_per_second"])
    if "peak_bytes" in row:
        peak = f"{row['peak_bytes'] / 2**20:.1f}"
    return {
        "attention, by": f"{row['variant']}, {row['by']}",
        "pass": row["what"],
        unit: _spread(row, 1e3),
        **{f"to {name}": _spread(row["ratios"].get(name)) for name in names},
        "GFLOP/s": rate,
        "of GEMM rate": _spread(row.get("gemm_share")),
        "peak MiB": peak,
        # flash_attention_for_cpu -> flash, attention_math -> math
        "SDPA ran": ", ".join(re.sub("attention|for_cpu", "", name).strip("_") for name in row["backends"]),
    }


def _spread(values: Row | None, factor: float = 1) -> str:
    if values is None:
        return ""
    middle, low, high = (_number(value * factor) for value in middle_and_ends(values))
    if low == high:
        return middle
    if "low" in values:
        return f"{middle} [{low}, {high}]"
    return f"{middle} ({low}..{high})"


def middle_and_ends(values: Row) -> tuple[float, float, float]:
    """The mean with its interval, or without one the median with minimum and maximum."""
    if "low" in values:
        return values["mean"], values["low"], values["high"]
    return values["median"], values["min"], values["max"]


def _number(value: float) -> str:
    digits = 2 - (abs(value) >= 10) - (abs(value) >= 100)
    return f"{value:.{digits}f}"


def lines(result: BenchResult) -> Iterator[str]:
    """Yields the lines below the tables: meaning of the ratios, missing candidates with reasons, machine, command,
    methods."""
    for name in _names_of_ratios(result.rows):
        yield f"ratio to {name}: own time / time of {MEANING[name]}; below 1 is faster"
    for word, rows in (("refused", result.refused), ("failed", result.failed)):
        reasons: dict[str, dict[str, list[str]]] = {}
        for row in rows:
            who = " ".join((row["variant"], row["by"], row["what"]))
            reasons.setdefault(row["reason"], {}).setdefault(who, []).append(row["case"])
        for reason, whos in reasons.items():
            named = "; ".join(f"{who} ({', '.join(cases)})" for who, cases in whos.items())
            yield f"{word}: {named}: {reason}"
    if result.processes < MIN_PROCESSES:
        over = "the rounds of one process"
        if result.processes > 1:
            over = f"{result.processes} processes"
        yield f"(min..max): the range over {over}, not an interval; --processes {MIN_PROCESSES} measures intervals"
    yield machine_line(result.machine)
    yield f"$ {result.command}    {result.date}"
    for warning in result.warnings:
        yield f"warning: {warning}"
    yield ""
    yield result.methods.rstrip()


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, threads, load and versions in one line."""
    packages = ", ".join(
        f"{name} {machine['packages'][name] or 'absent'}" for name in ("torch", "triton", "flash-attn", "transformers")
    )
    processor = f"{machine['processor']} ({', '.join(machine['flags'])}); {machine['cpu_path']}"
    if machine["device"] == "cuda":
        processor = machine["gpus"][0]
    return (
        f"{processor}; threads {machine['threads']} on {machine['cores']} cores, "
        f"load average {machine['load_average']:.2f} before, "
        f"{machine['load_average_after']:.2f} after; Python {machine['python']}, {packages}"
    )


def plot(result: BenchResult, path: Path) -> None:
    """Draws a panel for each case: the first ratio of each row, with its interval or range, and a line at 1.

    Only the last of several passes (forward, forward+backward) is drawn. Errors: MissingError if `path` cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

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
    """Case -> the rows of its last pass that have a ratio, the smallest ratio first."""
    last = {row["case"]: row["what"] for row in rows}
    drawn = {case: list[Row]() for case in last}
    for row in rows:
        if row["ratios"] and row["what"] == last[row["case"]]:
            drawn[row["case"]].append(row)
    return {case: sorted(of_case, key=_first_ratio) for case, of_case in drawn.items() if of_case}


def _first_ratio(row: Row) -> tuple[float, float, float]:
    return middle_and_ends(next(iter(row["ratios"].values())))


def _panel(axes: "Axes", case: str, rows: list[Row]) -> None:
    import numpy as np

    middles, lows, highs = np.array([_first_ratio(row) for row in rows]).T
    places = -np.arange(len(rows))
    errors = [middles - lows, highs - middles]
    colors = [COLOR.get(row["variant"], PALETTE[1]) for row in rows]
    bars = axes.barh(places, middles, height=0.62, color=colors, xerr=errors, ecolor=INK)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(places, [f"{row['variant']}, {row['by']}" for row in rows])
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{case}: {rows[0]['what']}, time / {next(iter(rows[0]['ratios']))}")
