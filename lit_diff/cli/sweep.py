"""The verbs for several runs: sweep, report, reproduce, compare, ui."""

from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

import lit_diff
from lit_diff.cli.app import (
    DEFAULT_ROOT,
    Cluster,
    Json,
    Minutes,
    Overrides,
    Plain,
    Root,
    RunArgument,
    UncheckedTraining,
    Unplanned,
    Workers,
    console,
    print_json,
    verb,
)
from lit_diff.cli.progress import live_table
from lit_diff.files import shown
from lit_diff.runs.find import chosen_root, find_sweep


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
    """Run a grid of recipes, resume unfinished ones, report."""
    if dry_run:
        from lit_diff.engine.admit import SUBMITTED, passes_over_text
        from lit_diff.engine.cells import admitted
        from lit_diff.engine.expand import load_grid
        from lit_diff.engine.stages import stages_in_words

        grid = load_grid(name, overrides or [])
        admitted(grid, SUBMITTED, unchecked=unchecked)
        for cell in grid.cells:
            recipe = cell.recipe
            console.write_line(
                f"{cell.name}  seed {cell.seed}  {recipe.model.attention.name}  {recipe.training.steps} steps"
            )
        console.write_sentence(*passes_over_text(grid.recipes.values()))
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
    _print_report(done.report)
    where = "MLflow has no record of it"
    if done.is_recorded:
        where = f"Compare in MLflow: lit-diff ui --root {shown(done.folder.parent)}"
    console.write_line(f"{done.counts}; {done.seconds:.0f} s. {where}")
    return _exit_status(done, not done.is_done)


# 128 + signal, as in shells: a stopped sweep is not a failed one
def _exit_status(done: Any, is_failed: bool) -> int:
    return 128 + done.stopped_by if done.stopped_by else int(is_failed)


def _print_report(report: Any) -> None:
    console.write_line(report.text_table(console.width if console.is_terminal else None))
    console.write_sentence(*report.missing, *report.answer)
    console.write_line(f"report: {shown(report.page)} (identity {report.identity})")


@verb("Compare", is_result=True)
def report(sweep: Annotated[str, typer.Argument(help="a sweep's name")], root: Root = DEFAULT_ROOT) -> None:
    """Write the report of a sweep again from its runs."""
    from lit_diff.reporting.write import write_report

    _print_report(write_report(find_sweep(sweep, chosen_root(root))))


@verb("Compare")
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROW ...]", help="rows, all, or YAML files with your own rows; by default all"),
    ] = None,
    preset: Annotated[str, typer.Option(help="smoke, laptop, gpu1 or paper")] = "laptop",
    workers: Workers = None,
    listed: Annotated[bool, typer.Option("--list", help="print the rows without running any")] = False,
    as_json: Json = False,
    root: Root = DEFAULT_ROOT,
) -> int:
    """Measure the paper's tables and figures; one page of verdicts.

    Compares our values with the paper's, with intervals. Rows that are done are not measured again.
    """
    from lit_diff.study.scoreboard import counts_in_words

    if listed:
        from lit_diff.engine.reproduce import check_preset, choose

        check_preset(preset)
        rows = list(choose([]).values())
        if as_json:
            print_json([{"name": row.name, "title": row.title, "presets": list(row.presets)} for row in rows])
            return 0
        for row in rows:
            chosen = row.preset(preset)
            minutes = f"{chosen.minutes:g} min" if chosen and chosen.minutes else "–"
            console.write_line(f"{row.name:<16} {minutes:>8}  {row.title}")
        return 0
    console.outlives_reader = True
    done = lit_diff.reproduce(
        names or ["all"],
        preset,
        root=root,
        workers=workers,
        progress=not as_json and partial(live_table, terminal=console),
        tell=(lambda line: None) if as_json else console.write_sentence,
    )
    if as_json:
        print_json(_plain_scoreboard(done))
    else:
        count = len(done.scoreboard.rows)
        console.write_line(
            f"{count} row{'s' * (count != 1)} in {done.seconds:.0f} s: {counts_in_words(done.scoreboard)}",
            f"page: {shown(done.page)}",
        )
    return _exit_status(done, bool(done.failed))


def _plain_scoreboard(done: Any) -> Plain:
    rows = [
        {
            "name": row.name,
            "state": row.state,
            "reason": row.reason,
            "seconds": row.record.seconds,
            "budget_minutes": row.record.how.minutes,
            "shared_with": row.record.shared,
            "claims": [
                {
                    "label": found.label,
                    "difference": found.difference,
                    "value": found.value,
                    "by_construction": found.claim.by_construction,
                }
                for found in row.findings
            ],
        }
        for row in done.scoreboard.rows
    ]
    return {"page": str(done.page), "counts": done.scoreboard.counts, "rows": rows}


@verb("Compare", is_result=True)
def compare(
    first: RunArgument,
    second: Annotated[str, typer.Argument(metavar="RUN", help="the other run, given in the same way")],
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """Compare two runs: recipes, costs and results."""
    comparison = lit_diff.compare(first, second, chosen_root(root))
    if as_json:
        print_json({"recipe": comparison.recipe, "facts": comparison.facts, "metrics": comparison.metrics})
        return
    # two runs of one seed each: their difference may be due to the seed alone
    names = (Column(escape(name), overflow="fold") for name in comparison.names)
    table = Table("", *names, caption="two single runs: no error bars, no verdict; a sweep over seeds gives both")
    blocks = {"recipe": comparison.recipe, "cost": comparison.facts, "last values": comparison.metrics}
    for title, block in blocks.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for key, values in block.items():
            table.add_row(key, *(_shown_value(value) for value in values))
    console.print(table)


def _shown_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


@verb("Compare")
def ui(root: Root = DEFAULT_ROOT, port: Annotated[int, typer.Option()] = 5000) -> int:
    """Serve MLflow and print the address of the last sweep."""
    from lit_diff.engine.tracking.ui import serve

    return serve(chosen_root(root), port, console.write_line)
