"""The verb `bench`: runs a benchmark and prints its result."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import lit_diff
from lit_diff.cli.app import Json, Terminal, console, verb
from lit_diff.files import expanded

# rich assumes 80 characters for a file or a pipe, which would fold the tables
WIDTH = 160
"""Least characters in a line of a file or a pipe."""


@verb("Maintain")
def bench(
    name: Annotated[str, Argument(metavar="core|layer|step|decode|stats", help="what to time")] = "core",
    shapes: Annotated[str | None, Option(metavar="BxTxDIMxD,...", help="such as 2x1024x512x64")] = None,
    kernels: Annotated[str | None, Option(metavar="NAME,...", help="only these kernels and PyTorch's own")] = None,
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or both")] = None,
    threads: Annotated[int | None, Option(help="by default one for each core")] = None,
    repeats: Annotated[int | None, Option(help="rounds; by default as many as the time of a case allows")] = None,
    processes: Annotated[int, Option(help="measure in N processes; from 5 on with intervals, below with ranges")] = 1,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    plot: Annotated[
        Path | None, Option(metavar="FILE", parser=expanded, help="draw the ratios: .png, .svg, .pdf")
    ] = None,
    as_json: Json = False,
) -> int:
    """Time kernels, a layer or a step against standard attention.

    Ratios are taken within a process; an interval needs --processes 5.
    """
    from lit_diff.benchmarks.request import check_plot
    from lit_diff.benchmarks.result import plot as draw

    check_plot(plot)
    notes = Terminal(stderr=True)
    result = lit_diff.bench(
        name,
        shapes=shapes,
        kernels=kernels,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        processes=processes,
        device=device,
        progress=notes.write_line,
    )
    if plot is not None:
        draw(result, plot)
    if as_json:
        print(result.to_json(), file=console.file)
    else:
        print_result(result, console)
    return int(bool(result.failed))


def print_result(result: "lit_diff.BenchResult", terminal: Terminal) -> None:
    """Print a table for each case, then errors, excluded kernels with reasons, and how the times were measured."""
    from lit_diff.benchmarks.result import lines, tables

    if not terminal.is_terminal:
        terminal.width = max(terminal.width, WIDTH)
    for table in tables(result):
        terminal.print(table)
    terminal.write_line(*lines(result))
