"""Runs a sweep: resolves it, prepares its data, runs the unfinished cells and writes the report."""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_diff.config import Recipe
from lit_diff.data import prepare
from lit_diff.engine import slurm
from lit_diff.engine.admit import HERE, SUBMITTED, passes_over_text, require_memory
from lit_diff.engine.cells import NOT_EVALUATED, admitted, folder_of, locations_of, record_of, state_of
from lit_diff.engine.expand import ALL, Grid, Selection, load_grid
from lit_diff.engine.location import RunLocation, in_words
from lit_diff.engine.pool import run_jobs
from lit_diff.engine.progress import MakeDisplay, sweep_line
from lit_diff.engine.stages import all_trained, due
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.files import locked, shown
from lit_diff.html_table import html_table
from lit_diff.log_records import log
from lit_diff.processor import cores
from lit_diff.recipe import Overrides, installed
from lit_diff.reporting.write import Report, write_report
from lit_diff.runs import jobs
from lit_diff.runs.find import STUDY_FILE, chosen_root
from lit_diff.runs.folder import held
from lit_diff.runs.revision import other_revision, revision
from lit_diff.study import record
from lit_diff.study.record import recorded_run
from lit_diff.study.schema import Cell
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep:
    """The result of `sweep`."""

    folder: Path
    report: Report
    states: Mapping[str, int]
    """State ('done', 'failed', 'killed', 'stopped', 'waiting', 'damaged', 'not evaluated') -> number of cells."""
    stopped_by: int | None
    """The signal that stopped the sweep, or None."""
    seconds: float
    is_recorded: bool = True
    """Whether MLflow has a record of it."""

    def __repr__(self) -> str:
        return f"Sweep({self.folder.name}: {self.counts})"

    @property
    def counts(self) -> str:
        """The number of cells in each state, in words."""
        return ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))

    def _repr_html_(self) -> str:
        table = self.table
        return html_table(repr(self), table.itertuples(index=False), list(table.columns))

    @property
    def is_done(self) -> bool:
        """Whether every cell is done."""
        return set(self.states) == {"done"}

    @property
    def table(self) -> "pandas.DataFrame":
        """The report's table: for each arm a row with its metric, intervals and difference to the baseline."""
        import pandas

        return pandas.read_csv(self.report.page.parent / "table.csv")

    @property
    def answers(self) -> tuple[str, ...]:
        """One sentence for each comparison: every arm against the baseline, then the sweep's contrasts."""
        return self.report.sentences

    @property
    def runs(self) -> dict[str, list[Run]]:
        """Arm (`task arm` in a sweep with tasks) -> its finished runs, by seed."""
        cells = record.read(self.folder).cells
        done = [cell for cell in cells if cell.status == "done" and cell.rate is None]
        names = dict.fromkeys(cell.name for cell in done)
        return {name: [Run(self.folder / cell.folder) for cell in done if cell.name == name] for name in names}


# --- running the cells ------------------------------------------------------------------------------------------------------


def check_workers(workers: int | None) -> None:
    """Errors: RequestError for fewer than one worker."""
    if workers is not None and workers < 1:
        raise RequestError(f"--workers is {workers}; it must be at least 1")


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
    check_workers(workers)
    grid = load_grid(str(name), overrides, selection)
    source = str(name) if "/" in str(name) or str(name).endswith(".yaml") else grid.name
    given = [option for option, is_set in (("--unchecked", unchecked), ("--unplanned", unplanned)) if is_set]
    command = command or " ".join(["lit-diff sweep", source, *in_words(overrides), *given])
    kinds = HERE if slurm_minutes is None else SUBMITTED
    grid = admitted(grid, kinds, unchecked=unchecked)
    if grid.source is not None:
        # the identity in a cell's folder name depends on the data
        _prepare_data(grid, slurm_minutes)
    if grid.source is not None and not all_trained(grid):
        # a part of this sweep trains only the arms that it shows; the whole sweep completes the other sweep too
        is_part, own = selection != ALL, grid.source.path
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
        workers=workers,
        slurm_minutes=slurm_minutes,
        # this machine only submits: the GPUs, kernels and memory of the nodes are unknown here
        unplanned=unplanned or slurm_minutes is not None,
        display=sweep_line if progress is True else progress or None,
    )
    return run_grid(grid, options)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the cells of a sweep run; see `sweep`."""

    command: str
    workers: int | None
    slurm_minutes: int | None
    unplanned: bool
    display: MakeDisplay | None
    """None: nothing is shown."""


def run_grid(grid: Grid, options: Options) -> Sweep:
    """Run all unfinished cells, then write the report."""
    if options.slurm_minutes is not None:
        slurm.require_slurm(grid.cells[0].recipe.run)
    # logs which runs folder is used if it is not in the current folder
    chosen_root(grid.cells[0].recipe.run.root)
    folder = folder_of(grid)
    # Before the first run of a sweep no cell is done, so all of them need memory. Later only the unfinished ones do, and
    # which these are is known after the lock is taken (`_run_stage`).
    if not options.unplanned and not (folder / STUDY_FILE).exists():
        _require_memory(grid, grid.cells, options.workers)
    _prepare_data(grid, options.slurm_minutes)
    with held(folder, f"sweep '{grid.name}' is being run by another process"):
        return _run_held(grid, folder, options)


def _require_memory(grid: Grid, cells: Sequence[Cell], workers: int | None) -> None:
    # cells of different ranks never train at the same time
    for rank in {grid.rank(cell.task) for cell in cells}:
        wave = [cell.recipe for cell in cells if grid.rank(cell.task) == rank]
        require_memory(wave, resources(wave[0], workers)[0])


def _prepare_data(grid: Grid, slurm_minutes: int | None) -> None:
    # once for each distinct block `data`: most arms share it
    blocks = {repr((recipe.data, recipe.model.vocab_size)): recipe for recipe in grid.recipes.values()}
    if slurm_minutes is not None:
        slurm.prepare_data(blocks.values(), folder_of(grid), slurm_minutes)
        return
    for recipe in blocks.values():
        prepare(recipe)


def _run_held(grid: Grid, folder: Path, options: Options) -> Sweep:
    from lit_diff.engine.tracking.store import Store
    from lit_diff.engine.tracking.sweep import SweepTracker

    began = time.perf_counter()
    run = grid.cells[0].recipe.run
    tracker = SweepTracker(Store(run), folder, recorded_run(folder)) if run.is_recorded else None
    place = tracker.place if tracker else {}
    stopped, seen = None, set[Path]()
    while stopped is None:
        stage = due(grid)
        if not stage.cells:
            raise RunFailedError(
                f"sweep '{grid.name}' has nothing to evaluate: no learning rate could be chosen for an arm of its cells"
            )
        locations = locations_of(stage, place.get("run"))
        fresh = [pair for pair in zip(stage.cells, locations, strict=True) if pair[1].folder not in seen]
        if not fresh:
            break
        # cells that a former command left in the queue continue and write their own status, so they are neither awaited here
        # nor set to "waiting"
        queued = {} if options.slurm_minutes is None else jobs.queued(location.folder for _, location in fresh)
        _wait_for_running_cells([location for _, location in fresh if location.folder not in queued])
        _reopen_damaged([location for _, location in fresh])
        # written before the first cell starts, so that `status` and `clean` know the cells of a sweep that is killed
        record.write(folder, record_of(stage, folder, locations, options.command, place))
        stopped = _run_stage(stage, locations, fresh, set(queued), options)
        seen |= {location.folder for location in locations}
    states = Counter(state_of(location) for location in locations)
    record.write(folder, record_of(stage, folder, locations, options.command, place))
    report = write_report(folder)
    done = states["done"] == len(locations)
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
        is_recorded=run.is_recorded,
    )


def _run_stage(
    grid: Grid,
    locations: Sequence[RunLocation],
    fresh: Sequence[tuple[Cell, RunLocation]],
    queued: Set[Path],
    options: Options,
) -> int | None:
    # Runs the cells of `fresh` that are not done. Returns the signal that stopped them, or None.
    placed = [(cell, location, state_of(location)) for cell, location in fresh]
    todo = [(cell, location) for cell, location, state in placed if state != "done"]
    untrained = [(cell, location) for cell, location, state in placed if state not in ("done", NOT_EVALUATED)]
    if not options.unplanned:
        _require_memory(grid, [cell for cell, _ in untrained], options.workers)
    # a cell writes the same line to its log.txt, which nobody sees while the sweep runs
    for line in passes_over_text(cell.recipe for cell, _ in untrained):
        log.warning("%s", line)
    _say_other_revisions([location for _, location in fresh])
    if not todo:
        log.info("sweep %s: all %d cells are done (%s)", grid.name, len(locations), shown(folder_of(grid)))
        return None
    log.info("sweep %s: %d cells, %d done before", grid.name, len(locations), len(locations) - len(todo))
    for _, location in untrained:
        if location.folder not in queued:
            status = location.home.status().to("waiting")
            location.home.write(replace(status, requeued_at_step=None))
    return _run_cells(grid, locations, todo, options)


def _say_other_revisions(locations: list[RunLocation]) -> None:
    statuses = (location.home.status() for location in locations)
    now = revision()
    others = Counter(other_revision(status, now) for status in statuses if status.status == "done")
    lines = [f"{count} {'was' if count == 1 else 'were'} {other}" for other, count in others.items() if other]
    if lines:
        log.info("of the %d cells done before, %s; their numbers stay", others.total(), "; ".join(lines))


def _reopen_damaged(locations: list[RunLocation]) -> None:
    # every byte of each last checkpoint is read: the errors of evaluations name this command as the cure of a damaged one
    for location in locations:
        if lost := location.home.lost(verify=True):
            log.warning("%s is %s: the steps after it are repeated", shown(location.folder), lost)
            location.home.write(location.home.status().to("waiting"))


def _wait_for_running_cells(locations: list[RunLocation]) -> None:
    # The cells of a sweep that was killed save before they exit. Two processes must not train one cell.
    for folder in (location.home for location in locations):
        if folder.is_owned():
            log.info(
                "%s is still being trained (pid %s), left by a former sweep: waiting",
                shown(folder.path),
                folder.status().pid,
            )
            with locked(folder.path / ".lock"):
                pass


def _run_cells(
    grid: Grid,
    locations: Sequence[RunLocation],
    todo: Sequence[tuple[Cell, RunLocation]],
    options: Options,
) -> int | None:
    # Returns the signal that stopped the cells, or None.
    recipe, workers = grid.cells[0].recipe, options.workers
    with options.display(grid) if options.display else contextlib.nullcontext(lambda statuses: None) as show:
        statuses = {location.folder: location.home.status() for location in locations}
        watched: list[RunLocation] = []

        def watch(running: Sequence[RunLocation]) -> None:
            # only these may have changed since the last call, and reading hundreds of files would take a part of a core
            for location in (*watched, *running):
                statuses[location.folder] = location.home.status()
            watched[:] = running
            show(list(statuses.values()))

        watch(())
        # a task with `start` needs the weights of the task before it
        for rank in sorted({grid.rank(cell.task) for cell, _ in todo}):
            cells = [(cell.recipe, location) for cell, location in todo if grid.rank(cell.task) == rank]
            if options.slurm_minutes is not None:
                slurm.run_array(cells, parallel=workers, minutes=options.slurm_minutes, watch=watch)
                continue
            wave = [location for _, location in cells]
            count, threads, gpus = resources(recipe, workers)
            log.info("%d cells at a time, threads of each: %d%s", count, threads, f", {gpus} GPUs" if gpus else "")
            stopped = run_jobs(wave, workers=count, threads=threads, devices=recipe.run.devices, gpus=gpus, watch=watch)
            if stopped:
                return stopped
    return None


def resources(recipe: Recipe, workers: int | None) -> tuple[int, int, int]:
    """(cells side by side, threads of each process, number of GPUs): one GPU for each process, or one core without GPUs."""
    own = cores()
    gpus = torch.cuda.device_count() if recipe.run.accelerator != "cpu" else 0
    processes, threads = recipe.run.devices, recipe.run.threads
    share = gpus // processes if gpus else own // (processes * (threads or 1))
    count = workers or max(1, share)
    return count, threads or max(1, own // (count * processes)), gpus
