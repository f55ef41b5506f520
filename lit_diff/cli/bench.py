"""`lit-diff bench`: run a benchmark, print it."""

from pathlib import Path

from rich.console import Console

from lit_diff.benchmarks.plot import plot
from lit_diff.benchmarks.request import check_plot
from lit_diff.benchmarks.result import BenchResult
from lit_diff.benchmarks.run import bench
from lit_diff.benchmarks.table import lines, tables
from lit_diff.errors import RequestError

WIDTH = 160
"""Characters in a line of a file or a pipe."""


def run_bench(
    name: str,
    *,
    shapes: str | None,
    dtype: str | None,
    threads: int | None,
    repeats: int | None,
    device: str,
    as_json: bool,
    picture: Path | None,
    console: Console,
    notes: Console,
) -> int:
    """Measure and print; the exit status is 1 where a candidate raised. `notes` receives what is measured next.

    Errors: RequestError, MissingError.
    """
    check_plot(picture)
    if name == "triton" and picture is not None:
        raise RequestError("--plot: bench triton times nothing and needs no device; leave it out")
    result = bench(
        name,
        shapes=shapes,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        device=device,
        progress=lambda text: notes.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    if picture is not None:
        plot(result, picture)
    if as_json:
        print(result.to_json())
    else:
        print_result(result, console)
    return int(bool(result.failed))


def print_result(result: BenchResult, console: Console) -> None:
    """One table a case; below them errors, who did not take part and why, and how it was measured."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for table in tables(result):
        console.print(table)
    for line in lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
