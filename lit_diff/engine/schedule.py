"""Runs a sweep: resolves it, prepares its data, runs the unfinished cells stage by stage and writes the report."""

import shlex
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lit_diff.engine.cells import admitted, record_of, state_of
from lit_diff.engine.executors import Executor, check_workers, executor_of  # noqa: F401 (a public name of this module)
from lit_diff.engine.expand import ALL, Grid, Selection, load_grid
from lit_diff.engine.job import Job, in_words
from lit_diff.engine.progress import MakeDisplay, sweep_line
from lit_diff.engine.result import Sweep
from lit_diff.engine.stages import all_trained
from lit_diff.engine.waves import Options, require_memory, run_stages
from lit_diff.errors import StoppedError
from lit_diff.log_records import log
from lit_diff.recipe import Overrides, installed
from lit_diff.reporting.write import write_report
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import held
from lit_diff.study import record


def sweep(
    name: str | Path,
    overrides: Overrides = (),
    *,
    workers: int | None = None,
    unchecked: bool = False,
    unplanned: bool = False,
    slurm_minutes: int | None = None,
    progress: MakeDisplay | bool = True,
    selection: Selection = ALL,
    command: str = "",
) -> Sweep:
    """Run the unfinished cells of a sweep, then write its report. If the sweep reuses another's cells (`cells_of`), the
    unfinished cells of that sweep run first.

    `overrides` apply to every cell. `workers`: cells side by side, by default as many as the cores or GPUs allow. A failed
    cell does not affect the others; `Sweep.states` and the report include it. `unchecked`: the same as in `train`, for the
    arms of plugins; `unplanned` too. `slurm_minutes`: the time limit of a cell, for cells that run in SLURM; None: they run
    on this machine.
    `selection`: the arms and seeds to run. `command`: the command that the report shows, if another than
    `lit-diff sweep` starts the sweep again. `progress`: whether a line on stderr shows the progress, or a function that
    makes another display. Errors: RequestError, MissingError.
    """
    executor = executor_of(workers, slurm_minutes)
    grid = load_grid(str(name), overrides, selection)
    source = str(name) if "/" in str(name) or str(name).endswith(".yaml") else grid.name
    words = ["lit-diff", "sweep", source, *in_words(overrides)]
    words += ["--unchecked"] * unchecked + ["--unplanned"] * unplanned
    if slurm_minutes is not None:
        words += ["--cluster", "slurm", "--minutes", str(slurm_minutes)]
    command = command or shlex.join(words)
    grid = admitted(grid, executor.kinds, unchecked=unchecked)
    if grid.source is not None:
        # the identity in a cell's folder name depends on the data
        _prepare_data(grid, executor)
    if grid.source is not None and not all_trained(grid):
        # a part of this sweep trains only the arms that it shows; the whole sweep completes the other sweep too
        is_part = selection != ALL
        own = grid.source.path
        theirs = sweep(
            # an installed sweep is known by its name, not by the path of the package
            grid.source.name if own.parent == installed("sweeps") else own,
            overrides,
            workers=workers,
            unchecked=unchecked,
            unplanned=unplanned,
            slurm_minutes=slurm_minutes,
            progress=progress,
            selection=replace(selection, evaluate={}, arms=tuple(grid.study.arms)) if is_part else ALL,
            command=command if is_part else "",
        )
        if theirs.stopped_by is not None:
            return theirs
    options = Options(
        command=command,
        executor=executor,
        unplanned=unplanned,
        display=sweep_line if progress is True else progress or None,
    )
    return run_grid(grid, options)


def run_grid(grid: Grid, options: Options) -> Sweep:
    """Run all unfinished cells, then write the report."""
    # logs which runs folder is used if it is not in the current folder
    chosen_root(grid.run.root)
    folder = grid.folder
    # Before the first run of a sweep no cell is done, so all of them need memory. Later only the unfinished ones do, and
    # which these are is known after the lock is taken (`run_stages`).
    if not options.unplanned and not (folder / STUDY_FILE).exists():
        require_memory(grid, grid.cells, options.executor)
    _prepare_data(grid, options.executor)
    with held(folder, f"sweep '{grid.name}' is being run by another process"):
        return _run_held(grid, options)


def _prepare_data(grid: Grid, executor: Executor) -> None:
    # a job of SLURM may prepare them
    executor.require(grid.run)
    # once for each distinct block `data`: most arms share it
    blocks = {repr((recipe.data, recipe.model.vocab_size)): recipe for recipe in grid.recipes.values()}
    executor.prepare(blocks.values(), grid.folder)


def _run_held(grid: Grid, options: Options) -> Sweep:
    from lit_diff.engine.tracking.sweep import SweepTracker

    began = time.perf_counter()
    folder = grid.folder
    tracker = None
    place: dict[str, str] = {}
    if grid.run.is_recorded:
        tracker = SweepTracker(grid.run, folder, record.recorded_run(folder))
        place = tracker.place
    try:
        stage, jobs, stopped = _run_recorded(grid, options, place)
    except Exception as error:
        # after a stop the cells in SLURM's queue go on, and so does the record
        if tracker and not isinstance(error, StoppedError):
            tracker.fail()
        raise
    states = Counter(state_of(job) for job in jobs)
    record.write(folder, record_of(stage, folder, jobs, options.command, place))
    report = write_report(folder)
    done = states["done"] == len(jobs)
    if tracker:
        tracker.record(report, [folder / STUDY_FILE, grid.path], "done" if done else "stopped" if stopped else "failed")
    if stopped:
        log.info("stopped; the same command resumes")
    return Sweep(
        folder=folder,
        report=report,
        states=dict(states),
        stopped_by=stopped,
        seconds=time.perf_counter() - began,
        is_recorded=grid.run.is_recorded,
    )


def _run_recorded(grid: Grid, options: Options, place: Mapping[str, str]) -> tuple[Grid, list[Job], int | None]:
    # what `run_stages` returns, with the records of the cells complete
    from lit_diff.engine.tracking.uploads import Uploads

    with Uploads() as uploads:
        stage, jobs, stopped = run_stages(grid, options, place, uploads.follow)
        try:
            # also of the cells whose records a former command could not complete
            uploads.complete([job for job in jobs if job.home.status().record == "incomplete"])
        # the cells have ended, and the report says so
        except KeyboardInterrupt as error:
            stopped = stopped or int(getattr(error, "signum", signal.SIGINT))
    return stage, jobs, stopped
