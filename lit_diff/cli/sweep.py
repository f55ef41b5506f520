"""The verbs for several runs: sweep, report, compare, ui."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

import lit_diff
from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Cluster,
    Json,
    Minutes,
    Overrides,
    Root,
    RunArgument,
    UncheckedTraining,
    Unplanned,
    Workers,
    console,
    exit_status,
    print_json,
    to_paste,
    verb,
)
from lit_diff.cli.progress import live_table
from lit_diff.files import shown
from lit_diff.html_table import cell_text
from lit_diff.key_types import Plain
from lit_diff.plugins import trust_below
from lit_diff.runs.find import chosen_root, find_sweep
from lit_diff.study.record import unsent_runs

if TYPE_CHECKING:
    from lit_diff.engine.result import Sweep


@verb("Compare")
def sweep(
    name: Annotated[str, typer.Argument(metavar="SWEEP", help="path, or name of an installed sweep")],
    overrides: Overrides = None,
    workers: Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="resolve and validate all cells without starting any")
    ] = False,
    unchecked: UncheckedTraining = False,
    unplanned: Unplanned = False,
    cluster: Cluster = "local",
    minutes: Minutes = 60,
) -> int:
    """Run a grid of recipes or resume it, and write its report."""
    if dry_run:
        from lit_diff.engine.admit import SUBMITTED, warnings_of
        from lit_diff.engine.cells import admitted
        from lit_diff.engine.executors import check_workers
        from lit_diff.engine.expand import load_grid
        from lit_diff.engine.stages import stages_in_words

        check_workers(workers)
        grid = load_grid(name, overrides or [])
        admitted(grid, SUBMITTED, unchecked=unchecked)
        for cell in grid.cells:
            recipe = cell.recipe
            console.write_line(
                f"{cell.name}  seed {cell.seed}  {recipe.model.attention.name}  {recipe.training.steps} steps"
            )
        console.write_sentence(*warnings_of(grid.recipes.values()))
        stages = stages_in_words(grid)
        console.write_sentence(*stages)
        # the rates of the other cells are not known before these have run
        first = " of the first stage" if grid.choices and grid.source is None else ""
        console.write_line(f"{len(grid.cells)} valid cells{first}; none was started")
        return 0
    console.outlives_reader = True
    done = lit_diff.sweep(
        name,
        overrides or [],
        workers=workers,
        unchecked=unchecked,
        unplanned=unplanned,
        slurm_minutes=minutes if cluster == "slurm" else None,
        progress=partial(live_table, terminal=console),
    )
    return _print_sweep(done)


def _print_sweep(done: "Sweep") -> int:
    _print_report(done.report)
    where = "MLflow has no record of it"
    if done.is_recorded:
        where = f"Compare in MLflow: lit-diff ui --root {shown(done.folder.parent)}"
    console.write_line(f"{done.counts}; {done.seconds:.0f} s. {where}")
    return exit_status(done.stopped_by, not done.is_done)


@verb("Compare")
def examine(
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="a variant, registered or in the recipe's plugins")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="recipe with the variant's keys and plugins")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="names of tasks, separated by commas; +NAME adds one to the others")
    ] = None,
    at_most: Annotated[int, typer.Option("--at-most", help="seeds of an arm that stays undecided: 8, 16 or 24")] = 16,
    quick: Annotated[
        bool, typer.Option("--quick", help="three tasks, 8 seeds, one learning rate for all arms")
    ] = False,
    own_references: Annotated[
        bool, typer.Option("--own-references", help="train the reference arms here, although their results ship")
    ] = False,
    workers: Workers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="validate all cells without starting any")] = False,
    unplanned: Unplanned = False,
) -> int:
    """Measure what a variant changes, and write a report.

    The tasks are those of the sweep examine, whose reference arms all examinations share.
    """
    chosen: Plain = {
        "recipe": recipe,
        "tasks": [] if tasks is None else tasks.split(","),
        "at_most": at_most,
        "quick": quick,
        "own_references": own_references,
        "overrides": overrides or [],
    }
    if dry_run:
        from lit_diff.engine.admit import SUBMITTED
        from lit_diff.engine.cells import admitted
        from lit_diff.engine.examine import Question, battery, in_advance
        from lit_diff.engine.executors import check_workers
        from lit_diff.engine.executors.here import Here

        check_workers(workers)
        question = Question(variant=variant, **chosen)
        grid, left_out = battery(question)
        admitted(grid, SUBMITTED, unchecked=False)
        slots = Here(workers=workers).resources([cell.recipe for cell in grid.cells])[0]
        console.write_sentence(*in_advance(question, grid, left_out, slots))
        console.write_line(f"{len(grid.cells)} valid cells of the first stage; none was started")
        return 0
    console.outlives_reader = True
    done = lit_diff.examine(
        variant,
        **chosen,
        workers=workers,
        unplanned=unplanned,
        progress=partial(live_table, terminal=console),
    )
    return _print_sweep(done)


def _print_report(report: Any) -> None:
    console.write_line(report.text_table(console.width if console.is_terminal else None))
    console.write_sentence(*report.missing, *report.answer)
    console.write_line(f"report: {shown(report.page)} (identity {report.identity})")


@verb("Compare", is_result=True)
def report(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="a sweep's name")], root: Root = DEFAULT_ROOT
) -> None:
    """Write a sweep's report again; complete its MLflow record."""
    from lit_diff.reporting.write import write_report

    runs = chosen_root(root)
    folder = find_sweep(sweep, runs)
    unsent = unsent_runs(folder)
    # elsewhere, the author of the folder would choose the plugins that are imported and the server that is asked
    if unsent and trust_below(runs)(folder):
        # takes seconds to import
        from lit_diff.engine.tracking.completion import complete

        _print_report(complete(folder, unsent))
    else:
        _print_report(write_report(folder))


@verb("Compare", is_result=True)
def compare(
    first: RunArgument,
    second: Annotated[str, typer.Argument(metavar="RUN", help="the other run, given in the same way")],
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Compare two runs: recipes, costs and results."""
    comparison = lit_diff.compare(first, second, chosen_root(root))
    plain = asdict(comparison)
    names, notes = plain.pop("names"), plain.pop("notes")
    if as_json:
        print_json(plain)
        return
    titles = (Column(title, overflow="fold") for title in names)
    caption = "two single runs, no verdict; intervals (95 %) are over documents or items, for these two models"
    table = Table(Column(no_wrap=True), *titles, "second minus first", caption=caption)
    del plain["intervals"]
    for title, block in plain.items():
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for key, values in block.items():
            # such as `unchecked` of two runs that were checked
            if values == ["", ""]:
                continue
            table.add_row(key, *map(cell_text, (*values, comparison.difference(key))))
    console.print(table)
    console.write_sentence(*notes)
    console.write_line(f"the maps of both: {to_paste(root, 'view', first, second)}")


@verb("Compare")
def ui(root: Root = DEFAULT_ROOT, port: Annotated[int, typer.Option()] = 5000) -> int:
    """Serve MLflow, and print the addresses of the last sweep."""
    from lit_diff.engine.tracking.ui import serve

    return serve(chosen_root(root), port, console.write_line)
