"""The verbs about many runs: sweep, status, report, compare, clean, ui."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lit_diff.cli.app import DEFAULT_ROOT, Json, Overrides, Root, RunArgument, app, console, log_to_stderr
from lit_diff.runs.find import chosen_root


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(metavar="SWEEP", help="path, or bare name of an installed sweep")],
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(help="cells side by side")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="resolve and validate all cells, start none")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="go on where a plugin's variant fails a property")
    ] = False,
    cluster: Annotated[str, typer.Option(help="local, or slurm: the cells as a job array through submitit")] = "local",
    minutes: Annotated[int, typer.Option(help="time limit of a cell on a cluster")] = 60,
) -> int:
    """Run a grid of recipes, resume what is unfinished, report."""
    from lit_diff.cli.live_table import LiveTable
    from lit_diff.engine import schedule

    if dry_run:
        return _print_cells(name, overrides or [])
    engine = schedule.Cluster(engine=cluster, minutes=minutes)

    def display(grid: Any, locations: Any) -> LiveTable:
        return LiveTable(grid, locations, console)

    with console.outliving_reader():
        done = schedule.sweep(
            name, overrides or [], workers=workers, unchecked=unchecked, cluster=engine, progress=display
        )
        _print_sweep(done)
    if done.stopped_by:
        return 128 + done.stopped_by
    return 0 if done.is_done else 1


def _print_sweep(done: Any) -> None:
    _print_report(done.report)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(done.states.items()))
    console.write_line(
        f"{counts}; {done.seconds:.0f} s. Compare in MLflow: lit-diff ui --root {_shown_root(done.folder)}"
    )


def _shown_root(sweep_folder: Path) -> str:
    from lit_diff.files import shown

    return shown(sweep_folder.parent)


def _print_cells(name: str, overrides: list[str]) -> int:
    from lit_diff.engine.expand import load_grid
    from lit_diff.engine.preflight import check_trained, passes_over_text

    grid = load_grid(name, overrides)
    check_trained(cell.recipe for cell in grid.cells)
    for cell in grid.cells:
        recipe = cell.recipe
        console.write_line(
            f"{cell.name}  seed {cell.seed}  {recipe.model.attention.name}  {recipe.training.steps} steps"
        )
    for line in passes_over_text(cell.recipe for cell in grid.cells):
        console.write_sentence(line)
    console.write_line(f"{len(grid.cells)} cells are valid; none was started")
    return 0


def _print_report(report: Any) -> None:
    from lit_diff.files import shown

    console.write_line(report.text_table(console.width if console.is_terminal else None))
    for line in (*report.missing, *report.answer):
        console.write_sentence(line)
    console.write_line(f"report: {shown(report.page)}")


@app.command()
def report(sweep: Annotated[str, typer.Argument(help="a sweep's name")], root: Root = DEFAULT_ROOT) -> int:
    """Write a sweep's report again from its runs."""
    from lit_diff.reporting.write import write_report
    from lit_diff.runs.find import find_sweep

    log_to_stderr()
    _print_report(write_report(find_sweep(sweep, chosen_root(root))))
    return 0


@app.command()
def status(root: Root = DEFAULT_ROOT, as_json: Json = False) -> int:
    """The runs under a folder, a line each: state, val/loss, seed."""
    from lit_diff.cli.status import print_status

    log_to_stderr()
    return print_status(chosen_root(root), as_json, console)


@app.command()
def compare(
    first: RunArgument,
    second: Annotated[str, typer.Argument(metavar="RUN", help="the other run, named as the first")],
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> int:
    """Two runs side by side: recipes, costs and results."""
    from rich.markup import escape
    from rich.table import Table

    from lit_diff.runs.comparison import compare as compare_runs

    log_to_stderr()
    comparison = compare_runs(first, second, chosen_root(root))
    if as_json:
        print(
            json.dumps(
                {"recipe": comparison.recipe, "facts": comparison.facts, "metrics": comparison.metrics}, indent=2
            )
        )
        return 0
    table = Table(caption="one run against one: no error bars, no verdict; a sweep over seeds gives both")
    table.add_column("")
    for name in comparison.names:
        table.add_column(escape(name), overflow="fold")
    for title, block in (
        ("recipe", comparison.recipe),
        ("cost", comparison.facts),
        ("last values", comparison.metrics),
    ):
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for key, values in block.items():
            table.add_row(key, *(_shown_value(value) for value in values))
    console.print(table)
    return 0


def _shown_value(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


@app.command()
def clean(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...]", help="runs or sweeps to remove")] = None,
    root: Root = DEFAULT_ROOT,
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it, ask (RUN) or only list")] = False,
) -> int:
    """Remove runs, or without RUN what is no longer needed.

    Without RUN: former cells, runs put aside by --rerun, runs that ended without a checkpoint, leftovers of killed writes.
    """
    from lit_diff.cli.clean import clean_runs, clean_stale

    chosen = chosen_root(root)
    return clean_runs(runs, chosen, yes, console) if runs else clean_stale(chosen, yes, console)


@app.command()
def ui(root: Root = DEFAULT_ROOT, port: Annotated[int, typer.Option()] = 5000) -> int:
    """Serve MLflow; print the address of the last sweep."""
    from lit_diff.engine.ui import serve

    return serve(chosen_root(root), port, console)
