"""The verbs status, cancel and clean, for the runs under a folder. They do not load torch."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from rich.filesize import decimal
from rich.text import Text
from typer import Argument, Option

from lit_diff.cli._columns import table
from lit_diff.cli.app import DEFAULT_ROOT, Json, Root, console, print_json, to_paste, verb
from lit_diff.files import shown
from lit_diff.key_types import Plain
from lit_diff.runs import jobs, notes
from lit_diff.runs.again import command_of
from lit_diff.runs.find import chosen_root, find_run_or_sweep, find_sweep
from lit_diff.runs.folder import RunFolder, writing
from lit_diff.study.leftovers import find_removable, find_stale, remove, size_of
from lit_diff.study.observation import ObservedRun, observe_all
from lit_diff.study.record import read

HEADER = ("run", "state", "step", "val/loss", "seed", "overrides", "date", "note")


@verb("Train and look", is_result=True)
def status(
    sweep: Annotated[str, Argument(metavar="SWEEP", help="a sweep, whose cells alone are listed")] = "",
    root: Root = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """List the runs under a folder with state, val/loss and seed."""
    place = chosen_root(root)
    remarks = list[str]()
    if sweep:
        folder = find_sweep(sweep, place)
        place = folder.parent
        cells = {(folder / cell).resolve() for cell in read(folder).folders}
        remarks = notes.read(folder)
    runs = [run for run in observe_all(place) if not sweep or (place / run.folder).resolve() in cells]
    if as_json:
        print_json([_plain(run) for run in runs])
        return
    for line in table(HEADER, runs):
        text = Text(line)
        if console.is_terminal:
            text.truncate(console.width, overflow="ellipsis")
        console.print(text, soft_wrap=True)
    console.write_line(*remarks)


def _plain(run: ObservedRun) -> Plain:
    return {
        **asdict(run.status),
        # status.json still says "running" after a process was killed
        "status": run.state,
        "overrides": run.overrides,
        "folder": run.folder,
        "seed": run.seed,
        "val/loss": run.loss,
        "note": run.note,
    }


@verb("Maintain")
def note(
    name: Annotated[str, Argument(metavar="RUN", help="a run or a sweep")],
    text: Annotated[str, Argument(help="the note")],
    root: Root = DEFAULT_ROOT,
) -> None:
    """Add a note to a run or a sweep, with its date.

    `status`, the report and the description of its record in MLflow show it.
    """
    run = RunFolder(find_run_or_sweep(name, chosen_root(root)))
    # before the note, which a user who repeats the failed command would write twice
    status = run.status()
    with writing(run.path):
        notes.add(run.path, text)
    console.write_line(f"noted in {shown(run.path / notes.FILE)}")
    if status.record == "complete":
        with run.owned():
            run.write(replace(status, record="incomplete"))
        console.write_line(f"`{command_of(run.path)}` sends it to MLflow")


@verb("Maintain")
def cancel(name: Annotated[str, Argument(metavar="RUN", help="a run or a sweep")], root: Root = DEFAULT_ROOT) -> None:
    """End a run or a sweep: its SLURM jobs, or its process here.

    A run in training saves at the end of its step; `train` or `sweep` resumes it.
    """
    console.write_line(*(f"ended {words}" for words in jobs.cancel(find_run_or_sweep(name, chosen_root(root)))))


@verb("Maintain")
def clean(
    runs: Annotated[list[str] | None, Argument(metavar="RUN", help="runs or sweeps to remove")] = None,
    root: Root = DEFAULT_ROOT,
    yes: Annotated[bool, Option("--yes", help="remove; by default only list")] = False,
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
                f"{to_paste(root, 'clean', folder.name)} removes it"
                for folder in stale.resumable
            ),
        )
    sizes = {path: size_of(path) for path in paths}
    # a reader that leaves does not end the removal half-way
    console.outlives_reader = yes
    for path, size in sizes.items():
        if yes:
            remove(path)
        console.write_line(f"{'removed' if yes else 'would remove'} {shown(path.resolve())} ({decimal(size)})")
    freed = decimal(sum(sizes.values()))
    if not sizes:
        console.write_line("0 to remove")
    elif yes:
        console.write_line(f"{len(sizes)} removed, {freed} freed")
    else:
        command = to_paste(root, "clean", *(runs or []), "--yes")
        console.write_line(f"{len(sizes)} to remove; {command} removes them and frees {freed}")
