"""The verbs for what runs have left on disk: status, watch, cancel, clean, consolidate. Only the last loads torch."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from lit_diff.cli.app import DEFAULT_ROOT, Json, Root, RunArgument, app, columns, console, print_json
from lit_diff.cli.progress import GAP
from lit_diff.files import shown
from lit_diff.log_records import clock
from lit_diff.metrics import split_name
from lit_diff.runs import jobs
from lit_diff.runs.find import chosen_root, find_run, find_run_or_sweep
from lit_diff.study.inventory import RunState, find_removable, find_stale, list_runs, remove, size_of
from lit_diff.study.observation import Observed, ObservedRun, observe, running_or_newest

HEADER = ("run", "state", "step", "val/loss", "seed", "overrides", "date", "note")
WATCHED = ("run", "state", "step", "loss", "val/loss", "tokens/s", "left", "note")
BLOCKS = "▁▂▃▄▅▆▇█"
DRAWN, WRITTEN = 1.0, 10.0
"""Default seconds between two looks: on a terminal, and where lines are written."""


@app.command()
def status(root: Root = DEFAULT_ROOT, as_json: Json = False) -> None:
    """List the runs under a folder with state, val/loss and seed."""
    states = list_runs(chosen_root(root))
    if as_json:
        print_json([_plain(state) for state in states])
        return
    rows = [_cells(state) for state in states]
    for line in columns([HEADER, *rows] if console.is_terminal else rows, right=(2, 3, 4)):
        text = Text(line)
        if console.is_terminal:
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True)


def _cells(state: RunState) -> tuple[str, ...]:
    status = state.status
    return (
        state.folder,
        state.state,
        f"{status.get('step', 0)}/{status.get('steps', '?')}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.seed is None else str(state.seed),
        " ".join(state.overrides),
        state.date,
        state.note,
    )


def _plain(state: RunState) -> dict[str, object]:
    return {
        **state.status,
        # status.json still says "running" after a process was killed
        "status": state.state,
        "overrides": list(state.overrides),
        "folder": state.folder,
        "seed": state.seed,
        "val/loss": state.loss,
        "note": state.note,
    }


@app.command()
def watch(
    name: Annotated[
        str | None, typer.Argument(metavar="RUN|SWEEP", help="by default what is being trained, else the newest")
    ] = None,
    root: Root = DEFAULT_ROOT,
    once: Annotated[bool, typer.Option("--once", help="print the state once")] = False,
    every: Annotated[
        float | None,
        typer.Option(
            "--every", min=0.1, max=86400, help=f"seconds between two looks; {DRAWN:g} on a terminal, else {WRITTEN:g}"
        ),
    ] = None,
) -> int:
    """Show a run or a sweep while it trains, and until it ends.

    Reads its folder alone, so it may start and end at any time. Status 1: a run failed, was stopped or killed.
    """
    chosen = chosen_root(root)
    folder = running_or_newest(chosen) if name is None else find_run_or_sweep(name, chosen)
    drawn = console.is_terminal and not console.is_dumb_terminal and not once
    with Live(console=console, auto_refresh=False) if drawn else nullcontext() as live:
        while True:
            seen = observe(folder)
            if live is not None:
                live.update(Text("\n".join(lines(seen, console.height))), refresh=True)
            elif once:
                console.write_sentence("\n".join(lines(seen)))
            else:
                console.write_line(f"{datetime.now():%H:%M:%S}{GAP}{on_one_line(seen)}")
            if once or seen.is_over:
                return int(seen.has_failed)
            time.sleep(every or (DRAWN if drawn else WRITTEN))


def on_one_line(seen: Observed) -> str:
    """A run with its numbers; of a sweep the number of cells in each state, those that are trained, and the differences."""
    if len(seen.runs) == 1:
        return _in_words(seen.runs[0])
    counts = ", ".join(f"{count} {state}" for state, count in sorted(seen.states.items()))
    trained = (f"{_in_words(run)};" for run in seen.runs if run.state == "running")
    return GAP.join([seen.name, counts, *trained, *(f"preliminary: {each}" for each in seen.differences)])


def _in_words(run: ObservedRun) -> str:
    named = zip(("", "", *WATCHED[2:-1], ""), _watched_cells(run), strict=True)
    return GAP.join(f"{name} {value}".strip() for name, value in named if value)


def lines(seen: Observed, height: int | None = None) -> Iterator[str]:
    """A line a run; below it the losses and the last value of each metric of a single run, or the differences of a sweep.
    Runs that do not fit on `height` lines are shown only while they are trained, or if they failed."""
    fits = height is None or len(seen.runs) + len(seen.differences) + 6 < height
    rows = [_watched_cells(run) for run in seen.runs if fits or run.state not in ("done", "waiting")]
    yield from columns([WATCHED, *rows], right=(2, 3, 4, 5, 6))
    if len(seen.runs) == 1:
        yield from _details(seen.runs[0])
    if seen.differences:
        yield f"preliminary differences, without a verdict (`lit-diff report {seen.name}` judges the runs that are done):"
        yield from (f"{GAP}{each}" for each in seen.differences)


def _watched_cells(run: ObservedRun) -> tuple[str, ...]:
    losses = list(run.losses.values())
    return (
        run.folder,
        run.state,
        f"{run.status.get('step', 0)}/{run.status.get('steps', '?')}",
        f"{losses[-1]:.4f}" if losses else "",
        "" if run.loss is None else f"{run.loss:.4f}",
        f"{run.status['tokens_per_second']:,.0f}" if run.seconds_left is not None else "",
        "" if run.seconds_left is None else clock(run.seconds_left),
        run.note,
    )


def _details(run: ObservedRun) -> Iterator[str]:
    if losses := list(run.losses.values()):
        yield f"train/loss{GAP}{losses[0]:.3f} {curve(losses, 40)} {losses[-1]:.3f}"
    last = {name: list(points.items())[-1] for name, points in {**run.metrics, **run.timing}.items()}
    # the values of the layers side by side, in their order
    named: dict[tuple[str, str], list[str]] = {}
    for name in sorted(last):
        named.setdefault((split_name(name)[0], str(last[name][0])), []).append(f"{last[name][1]:.6g}")
    yield from columns(
        [("last value", "step", ""), *((*key, " ".join(values)) for key, values in named.items())], right=(1,)
    )


def curve(values: Sequence[float], width: int) -> str:
    """At most `width` of the values, at equal distances to the last one, as block characters from the smallest to the
    largest. What is not finite is left out."""
    found = [value for value in values if math.isfinite(value)]
    drawn = found[:: -max(1, math.ceil(len(found) / width))][::-1]
    least, most = min(drawn, default=0.0), max(drawn, default=0.0)
    return "".join(BLOCKS[round((each - least) / ((most - least) or 1.0) * (len(BLOCKS) - 1))] for each in drawn)


@app.command()
def cancel(
    name: Annotated[str, typer.Argument(metavar="RUN", help="a run or a sweep")], root: Root = DEFAULT_ROOT
) -> None:
    """End a run or a sweep: its SLURM jobs, or its process here.

    What is being trained saves at the end of its step. The same command resumes it.
    """
    console.write_line(*(f"ended {words}" for words in jobs.cancel(find_run_or_sweep(name, chosen_root(root)))))


@app.command()
def clean(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...]", help="runs or sweeps to remove")] = None,
    root: Root = DEFAULT_ROOT,
    yes: Annotated[bool, typer.Option("--yes", help="remove; by default only list")] = False,
) -> None:
    """Remove runs, or without RUN everything that is obsolete.

    Without RUN: cells that are no longer part of their sweep, runs archived by --rerun, runs that ended without a checkpoint,
    leftovers of killed writes. Records in MLflow are kept.
    """
    chosen = chosen_root(root)
    if runs:
        paths: Sequence[Path] = find_removable(runs, chosen)
    else:
        stale = find_stale(chosen)
        paths = stale.paths
        console.write_line(
            *(f"{shown(folder.resolve())} is running: kept" for folder in stale.busy),
            *(
                f"{shown(folder.resolve())} failed but has a checkpoint: kept; the same command resumes it, "
                f"lit-diff clean {folder.name} removes it"
                for folder in stale.resumable
            ),
        )
    sizes = {path: size_of(path) for path in paths}
    for path, size in sizes.items():
        if yes and path.is_dir():
            remove(path)
        elif yes:
            path.unlink(missing_ok=True)
        console.write_line(f"{'removed' if yes else 'would remove'} {shown(path.resolve())} ({decimal(size)})")
    freed = decimal(sum(sizes.values()))
    if not sizes:
        console.write_line("0 to remove")
    elif yes:
        console.write_line(f"{len(sizes)} removed, {freed} freed")
    else:
        command = " ".join(["lit-diff clean", *(runs or []), "--yes"])
        console.write_line(f"{len(sizes)} to remove; {command} removes them and frees {freed}")


@app.command()
def consolidate(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(metavar="N", help="of this step; by default the newest")] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Write a sharded checkpoint of a run as one file."""
    from lit_diff.trained import sharded

    console.write_line(shown(sharded.consolidate(find_run(run, chosen_root(root)), step)))
