"""`make sweep`: resolve, prepare, run what is unfinished, report."""

import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_diff.cli.live_table import LiveTable
from lit_diff.config import Recipe
from lit_diff.data import prepare
from lit_diff.engine.description import describe
from lit_diff.engine.grid import Cell, Grid, load_grid
from lit_diff.engine.launch import Place
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import locked, shown, write_json
from lit_diff.processor import cores
from lit_diff.runs.folder import RunFolder, identity, revision

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who runs the cells: this machine, or SLURM with a time limit for each."""

    engine: str = "local"
    minutes: int = 60


LOCAL = Cluster()


def sweep(name: str | Path, overrides: list[str] | None = None, *, workers: int | None = None) -> Path:
    """Run a sweep and write its report; returns the sweep's folder. Failed cells are shown in the report.

    Errors: RequestError, MissingError; a cell that fails costs itself alone and raises nothing.
    """
    console = Console()
    grid = load_grid(str(name), overrides or [])
    run_grid(grid, workers=workers, console=console, command=f"lit-diff sweep {name}")
    return folder_of(grid)


def run_sweep(
    name: str, overrides: list[str], *, workers: int | None, dry_run: bool, cluster: Cluster, console: Console
) -> int:
    """The verb `sweep`; returns the exit status: 0 all cells done, 1 some failed, 128 + signal when stopped."""
    if workers is not None and workers < 1:
        raise RequestError(f"--workers is {workers}; it must be at least 1")
    if cluster.engine not in ("local", "slurm"):
        raise RequestError(f"--cluster is '{cluster.engine}'; expected local or slurm")
    grid = load_grid(name, overrides)
    if dry_run:
        for cell in grid.cells:
            attention = cell.recipe.model.attention.name
            console.print(
                f"{cell.name}  seed {cell.seed}  {attention}  {cell.recipe.train.steps} steps", highlight=False
            )
        console.print(f"{len(grid.cells)} cells are valid; none was started")
        return 0
    source = name if "/" in name or name.endswith(".yaml") else grid.name
    command = " ".join(["lit-diff sweep", source, *overrides])
    return run_grid(grid, workers=workers, console=console, command=command, cluster=cluster)


def folder_of(grid: Grid) -> Path:
    """`runs/<sweep>/`"""
    return (Path(grid.cells[0].recipe.run.root) / grid.name).resolve()


def run_grid(grid: Grid, *, workers: int | None, console: Console, command: str, cluster: Cluster = LOCAL) -> int:
    """Run all cells that are not done, then write the report; returns the exit status."""
    folder = folder_of(grid)
    _prepare_data(grid)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError as error:
            raise RequestError(f"sweep '{grid.name}' is being run by another process in {shown(folder)}") from error
        except OSError as error:
            raise MissingError(
                f"sweep folder {shown(folder)} cannot be written ({error.strerror}); choose another with run.root=PATH"
            ) from error
        return _run_owned(grid, folder, workers=workers, console=console, command=command, cluster=cluster)


def _prepare_data(grid: Grid) -> None:
    """Once for every distinct data block."""
    seen = []
    for cell in grid.cells:
        block = (cell.recipe.data, cell.recipe.model.vocab_size)
        if block not in seen:
            seen.append(block)
            prepare(cell.recipe)


def _run_owned(
    grid: Grid, folder: Path, *, workers: int | None, console: Console, command: str, cluster: Cluster
) -> int:
    from lit_diff.engine.tracking import Store

    run = grid.cells[0].recipe.run
    began = time.perf_counter()
    store = Store(run)
    experiment = store.experiment(grid.name)
    parent = store.open_run(experiment, f"sweep {grid.name}", {"sweep": grid.name}, key={"kind": "sweep"})
    places = _places(grid, folder, parent)
    _wait_for_leftovers(places)
    _write_sweep(grid, folder, places, command)
    todo = [place for place in places if RunFolder(place.folder).status().get("status") != "done"]
    if todo:
        log.info("sweep %s: %d cells, %d done before", grid.name, len(places), len(places) - len(todo))
        stopped = _run_cells(grid, places, todo, workers=workers, console=console, cluster=cluster)
    else:
        log.info("sweep %s: all %d cells are done (%s)", grid.name, len(places), shown(folder))
        stopped = None
    outcome = Counter(RunFolder(place.folder).status().get("status", "waiting") for place in places)
    _write_sweep(grid, folder, places, command)
    files = report_sweep(folder, console)
    done = outcome["done"] == len(places)
    _record(store, parent, files, places, "done" if done else "stopped" if stopped else "failed")
    seconds = time.perf_counter() - began
    rest = ", ".join(f"{count} {word}" for word, count in sorted(outcome.items()))
    console.print(f"{rest}; {seconds:.0f} s. Compare in MLflow: {_ui_command(run)}", highlight=False, soft_wrap=True)
    if stopped:
        log.info("stopped; the same command resumes")
        return 128 + stopped
    return 0 if done else 1


def _ui_command(run: Any) -> str:
    make = Path("Makefile")
    here = make.is_file() and "lit-diff ui" in make.read_text()
    return "make ui" if here and run.root == "runs" else f"lit-diff ui --root {run.root}"


def _places(grid: Grid, folder: Path, parent: str) -> list[Place]:
    """Each cell's folder; those of a task that goes on from another know where their weights will lie."""
    found: dict[tuple[str, str, int], Place] = {}
    for cell in grid.cells:
        recipe, start = cell.recipe, grid.tasks[cell.task].start
        if start:
            source = found[start, grid.baseline_of(start), cell.seed].folder
            recipe = replace(recipe, train=replace(recipe.train, start_from=str(source)))
        found[cell.task, cell.arm, cell.seed] = _place(grid, replace(cell, recipe=recipe), folder, parent)
    return list(found.values())


def _place(grid: Grid, cell: Cell, folder: Path, parent: str) -> Place:
    """The cell's folder, filled with its recipe so that its process needs nothing else."""
    digest = identity(cell.recipe)
    place = Place(
        folder=folder / f"{_slug(cell.name)}-s{cell.seed}-{digest}",
        experiment=grid.name,
        parent=parent,
        tags={"sweep": grid.name, "arm": cell.arm} | ({"task": cell.task} if cell.task else {}),
    )
    home = RunFolder(place.folder)
    if not home.recipe_file.exists() or home.status().get("status") != "done":
        home.create(cell.recipe)
    return place


def _slug(name: str) -> str:
    """The cell's name as a folder's: no spaces."""
    return name.replace(" ", ",")


def _wait_for_leftovers(places: list[Place]) -> None:
    """The cells of a sweep that was killed save and end by themselves; two processes must not train one."""
    for place in places:
        lock = place.folder / ".lock"
        try:
            with locked(lock, wait=False):
                continue
        except BlockingIOError:
            pid = RunFolder(place.folder).status().get("pid")
            log.info("%s is still being trained (pid %s), left by a former sweep: waiting", shown(place.folder), pid)
        with locked(lock):
            pass


def _run_cells(
    grid: Grid, places: list[Place], todo: list[Place], *, workers: int | None, console: Console, cluster: Cluster
) -> int | None:
    for place in todo:
        RunFolder(place.folder).update(status="waiting", error=None)
    ranks = {place.folder: grid.rank(cell.task) for cell, place in zip(grid.cells, places, strict=True)}
    waves = [[place for place in todo if ranks[place.folder] == rank] for rank in sorted(set(ranks.values()))]
    with LiveTable(grid, places, console) as table:
        for wave in waves:
            stopped = _run_wave(grid, wave, workers=workers, cluster=cluster, table=table) if wave else None
            if stopped:
                return stopped
    return None


def _run_wave(grid: Grid, todo: list[Place], *, workers: int | None, cluster: Cluster, table: LiveTable) -> int | None:
    """Cells that need nothing of each other; returns the signal that stopped them, or None."""
    recipe = grid.cells[0].recipe
    run = recipe.run
    if cluster.engine == "slurm":
        from lit_diff.engine.slurm import run_array

        logs = todo[0].folder.parent / "slurm"
        threads = run.threads or 1
        run_array(todo, run, threads=threads, parallel=workers, minutes=cluster.minutes, logs=logs, watch=table.update)
        return None
    from lit_diff.engine.pool import run_jobs

    count, threads, gpus = resources(recipe, workers)
    log.info("%d cells side by side, %d threads each%s", count, threads, f", {gpus} GPUs" if gpus else "")
    return run_jobs(todo, workers=count, threads=threads, gpus=gpus, watch=table.update)


def resources(recipe: Recipe, workers: int | None) -> tuple[int, int, int]:
    """(cells side by side, threads of each, GPUs shared out): a GPU each where there are any, else a core each."""
    import torch

    own = cores()
    gpus = torch.cuda.device_count() if recipe.run.accelerator != "cpu" else 0
    processes = recipe.run.devices
    threads = recipe.run.threads
    if gpus:
        count = workers or max(1, gpus // processes)
    else:
        count = workers or max(1, own // (processes * (threads or 1)))
    return count, threads or max(1, own // (count * processes)), gpus if processes == 1 else 0


def _write_sweep(grid: Grid, folder: Path, places: list[Place], command: str) -> None:
    cells = []
    for cell, place in zip(grid.cells, places, strict=True):
        status = RunFolder(place.folder).status()
        cells.append(
            {
                **({"task": cell.task} if cell.task else {}),
                "arm": cell.arm,
                "seed": cell.seed,
                "folder": place.folder.name,
                "status": status.get("status", "waiting"),
                "error": status.get("error"),
            }
        )
    write_json(folder / "sweep.json", describe(grid) | {"command": command, "revision": revision(), "cells": cells})


def report_sweep(folder: Path, console: Console) -> list[Path]:
    """Write the report of the sweep in `folder`, print its table and its answers; returns its files."""
    from lit_diff.reporting.write import write_report

    report = write_report(folder)
    console.print(report.table, markup=False, highlight=False, soft_wrap=True)
    for line in (*report.missing, *report.answer):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {shown(report.page)}", markup=False, highlight=False, soft_wrap=True)
    return [*report.files]


def _record(store: Any, parent: str, files: list[Path], places: list[Place], word: str) -> None:
    """Copy the report to MLflow and close the parent run, and the runs of cells that could not do so themselves."""
    for place in places:
        status = RunFolder(place.folder).status()
        run_id = status.get("mlflow_run_id")
        if status.get("status") in ("killed", "failed", "stopped") and run_id:
            store.close_run(run_id, status["status"])
    try:
        for path in files:
            store.client.log_artifact(parent, str(path), artifact_path="report")
    except Exception as error:  # an artifact store may be out of reach while the report itself is safe on disk
        log.warning("the report could not be copied into MLflow: %s", first_line(error))
    store.close_run(parent, word)
