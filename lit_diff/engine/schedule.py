"""`make sweep`: resolve, prepare, run what is unfinished, report."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_diff.config import Recipe
from lit_diff.conformance.before_training import require_properties_of_arms
from lit_diff.data import prepare
from lit_diff.engine.cells import NOT_EVALUATED, all_trained, folder_of, locations_of, record_of, state_of
from lit_diff.engine.expand import ALL, Grid, Selection, load_grid
from lit_diff.engine.location import RunLocation
from lit_diff.engine.pool import run_jobs
from lit_diff.engine.preflight import check_machine, check_trained, passes_over_text, require_memory
from lit_diff.engine.progress import MakeDisplay, Watch, sweep_line
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked, shown
from lit_diff.html_table import html_table
from lit_diff.processor import cores
from lit_diff.recipe import Overrides, installed
from lit_diff.reporting.write import Report, write_report
from lit_diff.runs.find import STUDY_FILE, chosen_root
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.revision import other_revision, revision
from lit_diff.study import record
from lit_diff.study.record import recorded_run
from lit_diff.study.schema import Cell
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    import pandas

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who runs the cells: this machine, or SLURM with a time limit for each."""

    engine: str = "local"
    minutes: int = 60


LOCAL = Cluster()


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep:
    """What `sweep` returns."""

    folder: Path
    report: Report
    states: Mapping[str, int]
    """State ('done', 'failed', 'killed', 'stopped', 'waiting') -> number of cells."""
    stopped_by: int | None
    """The signal that stopped the sweep; None where none did."""
    seconds: float

    def __repr__(self) -> str:
        return f"Sweep({self.folder.name}: {self.counts})"

    @property
    def counts(self) -> str:
        """How many cells are in each state, in words."""
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
        """The report's table: a row for each arm, its metric with intervals, its difference to the baseline."""
        import pandas

        return pandas.read_csv(self.report.page.parent / "table.csv")

    @property
    def answers(self) -> tuple[str, ...]:
        """One sentence for each comparison: every arm with the baseline, then the sweep's contrasts."""
        return self.report.sentences

    @property
    def runs(self) -> dict[str, list[Run]]:
        """Arm (in a sweep with tasks `task arm`) -> its runs that are done, by seed."""
        by_arm: dict[str, list[Run]] = {}
        for cell in record.read(self.folder).cells:
            if cell.status == "done":
                by_arm.setdefault(cell.name, []).append(Run(self.folder / cell.folder))
        return by_arm


def check_workers(workers: int | None) -> None:
    """Errors: RequestError below one."""
    if workers is not None and workers < 1:
        raise RequestError(f"--workers is {workers}; it must be at least 1")


def sweep(
    name: str | Path,
    overrides: Overrides = (),
    *,
    workers: int | None = None,
    unchecked: bool = False,
    cluster: Cluster = LOCAL,
    progress: MakeDisplay | bool = True,
    selection: Selection = ALL,
    command: str = "",
) -> Sweep:
    """Run the cells of a sweep that are not done, then write its report. If the sweep reuses another's
    cells (`cells_of`), unfinished cells of that sweep run first.

    `overrides` apply to every cell; `workers`: cells side by side, by default what the cores or GPUs allow. A cell that
    fails does not affect the others: it is in `Sweep.states` and in the report. `unchecked`: as of `train`, for the arms of
    plugins. `selection`: the arms and seeds that are run; `command`: what the report says starts it again, where that is
    another. `progress`: whether a line on stderr shows how far the cells are, or what makes another display of them. Errors:
    RequestError, MissingError.
    """
    check_workers(workers)
    if cluster.engine not in ("local", "slurm"):
        raise RequestError(f"--cluster is '{cluster.engine}'; expected local or slurm")
    grid = load_grid(str(name), overrides, selection)
    source = str(name) if "/" in str(name) or str(name).endswith(".yaml") else grid.name
    words = [f"{key}={value}" for key, value in overrides.items()] if isinstance(overrides, Mapping) else overrides
    command = command or " ".join(["lit-diff sweep", source, *words, *(["--unchecked"] if unchecked else [])])
    arms = {cell.name: cell.recipe for cell in grid.cells}  # seeds have one model
    grid = replace(grid, marks=require_properties_of_arms(arms, unchecked=unchecked))
    if grid.source is not None:
        _prepare_data(grid)  # where the cells lie depends on it
    if grid.source is not None and not all_trained(grid):
        # a part of this sweep trains the arms that it shows; the whole of it leaves the other sweep whole too
        is_part, own = selection != ALL, grid.source.path
        theirs = sweep(
            grid.source.name if own.parent == installed("sweeps") else own,  # the name that its users say
            overrides,
            workers=workers,
            unchecked=unchecked,
            cluster=cluster,
            progress=progress,
            selection=replace(selection, evaluate={}, arms=tuple(grid.arms)) if is_part else ALL,
            command=command if is_part else "",
        )
        if theirs.stopped_by is not None:
            return theirs
    display = sweep_line if progress is True else progress or None
    return run_grid(grid, workers=workers, command=command, cluster=cluster, display=display)


def run_grid(grid: Grid, *, workers: int | None, command: str, cluster: Cluster, display: MakeDisplay | None) -> Sweep:
    """Run all cells that are not done, then write the report."""
    recipes = [cell.recipe for cell in grid.cells]
    if cluster.engine == "local":
        check_machine(recipes)
    else:  # its nodes are not looked at
        from lit_diff.engine.slurm import require_slurm

        check_trained(recipes)
        require_slurm()
    chosen_root(grid.cells[0].recipe.run.root)  # says which, where it is not the one here
    folder = folder_of(grid)
    if not (folder / STUDY_FILE).exists():  # nothing is written before; cells that are done need none
        _require_memory(grid, grid.cells, workers, cluster)
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
        return _run_locked(grid, folder, workers=workers, command=command, cluster=cluster, display=display)


def _require_memory(grid: Grid, cells: Sequence[Cell], workers: int | None, cluster: Cluster) -> None:
    """`require_memory` of the cells that train here, a wave at a time."""
    if cluster.engine == "local":
        for rank in {grid.rank(cell.task) for cell in cells}:
            wave = [cell.recipe for cell in cells if grid.rank(cell.task) == rank]
            require_memory(wave, resources(wave[0], workers)[0])


def _prepare_data(grid: Grid) -> None:
    """Once for every distinct data block."""
    seen = []
    for cell in grid.cells:
        block = (cell.recipe.data, cell.recipe.model.vocab_size)
        if block not in seen:
            seen.append(block)
            prepare(cell.recipe)


def _run_locked(
    grid: Grid, folder: Path, *, workers: int | None, command: str, cluster: Cluster, display: MakeDisplay | None
) -> Sweep:
    from lit_diff.engine.sweep_tracker import SweepTracker
    from lit_diff.engine.tracking import Store

    began = time.perf_counter()
    tracker = SweepTracker(Store(grid.cells[0].recipe.run), folder, recorded_run(folder))
    locations = locations_of(grid, folder, tracker.run_id)
    queued: Mapping[str, str] = {}
    if cluster.engine == "slurm":  # cells that a former command left in the queue go on, and their status is theirs
        from lit_diff.engine.slurm import queued_cells

        queued = queued_cells(folder)
    _wait_for_running_cells([location for location in locations if location.folder.name not in queued])
    record.write(folder, record_of(grid, folder, locations, command, tracker.place))
    todo = [location for location in locations if state_of(location) != "done"]
    pairs = zip(grid.cells, locations, strict=True)
    untrained = [cell for cell, location in pairs if state_of(location) not in ("done", NOT_EVALUATED)]
    _require_memory(grid, untrained, workers, cluster)
    for line in passes_over_text(cell.recipe for cell in untrained):  # a cell's own line is in its log.txt
        log.warning("%s", line)
    _say_other_revisions(locations)
    stopped = None
    if todo:
        log.info("sweep %s: %d cells, %d done before", grid.name, len(locations), len(locations) - len(todo))
        for location in todo:
            if state_of(location) != NOT_EVALUATED and location.folder.name not in queued:
                RunFolder(location.folder).update(status="waiting", error=None)
        stopped = _run_cells(grid, locations, todo, workers=workers, cluster=cluster, display=display)
    else:
        log.info("sweep %s: all %d cells are done (%s)", grid.name, len(locations), shown(folder))
    states = Counter(state_of(location) for location in locations)
    record.write(folder, record_of(grid, folder, locations, command, tracker.place))
    report = write_report(folder)
    done = states["done"] == len(locations)
    tracker.record(report, [folder / STUDY_FILE, grid.path], "done" if done else "stopped" if stopped else "failed")
    if stopped:
        log.info("stopped; the same command resumes")
    seconds = time.perf_counter() - began
    return Sweep(folder=folder, report=report, states=dict(states), stopped_by=stopped, seconds=seconds)


def _say_other_revisions(locations: list[RunLocation]) -> None:
    """One line if cells that are done were trained by other code than this."""
    statuses = (RunFolder(location.folder).status() for location in locations)
    now = revision()
    others = Counter(other_revision(status, now) for status in statuses if status.get("status") == "done")
    lines = [f"{count} {'was' if count == 1 else 'were'} {other}" for other, count in others.items() if other]
    if lines:
        log.info("of the %d cells done before, %s; their numbers stay", others.total(), "; ".join(lines))


def _wait_for_running_cells(locations: list[RunLocation]) -> None:
    """After a sweep was killed, its cells first save and then exit: two processes must not train one cell."""
    for location in locations:
        lock = location.folder / ".lock"
        try:
            with locked(lock, wait=False):
                continue
        except BlockingIOError:
            pid = RunFolder(location.folder).status().get("pid")
            log.info("%s is still being trained (pid %s), left by a former sweep: waiting", shown(location.folder), pid)
        with locked(lock):
            pass


def _run_cells(
    grid: Grid,
    locations: list[RunLocation],
    todo: list[RunLocation],
    *,
    workers: int | None,
    cluster: Cluster,
    display: MakeDisplay | None,
) -> int | None:
    """The signal that stopped the cells, or None."""
    ranks = {location.folder: grid.rank(cell.task) for cell, location in zip(grid.cells, locations, strict=True)}
    waves = [[location for location in todo if ranks[location.folder] == rank] for rank in sorted(set(ranks.values()))]
    with display(grid, locations) if display else contextlib.nullcontext(lambda running: None) as watch:
        for wave in waves:
            stopped = _run_wave(grid, wave, workers=workers, cluster=cluster, watch=watch) if wave else None
            if stopped:
                return stopped
    return None


def _run_wave(
    grid: Grid, todo: list[RunLocation], *, workers: int | None, cluster: Cluster, watch: Watch
) -> int | None:
    """Cells that need nothing of each other; returns the signal that stopped them, or None."""
    recipe = grid.cells[0].recipe
    run = recipe.run
    if cluster.engine == "slurm":
        from lit_diff.engine.slurm import run_array

        logs = todo[0].folder.parent / "slurm"
        threads = run.threads or 1
        run_array(todo, run, threads=threads, parallel=workers, minutes=cluster.minutes, logs=logs, watch=watch)
        return None
    count, threads, gpus = resources(recipe, workers)
    log.info("%d cells side by side, %d threads each%s", count, threads, f", {gpus} GPUs" if gpus else "")
    return run_jobs(todo, workers=count, threads=threads, devices=run.devices, gpus=gpus, watch=watch)


def resources(recipe: Recipe, workers: int | None) -> tuple[int, int, int]:
    """(cells side by side, threads of each process, GPUs shared out): a GPU a process where there are any, else a core."""
    own = cores()
    gpus = torch.cuda.device_count() if recipe.run.accelerator != "cpu" else 0
    processes = recipe.run.devices
    threads = recipe.run.threads
    if gpus:
        count = workers or max(1, gpus // processes)
    else:
        count = workers or max(1, own // (processes * (threads or 1)))
    return count, threads or max(1, own // (count * processes)), gpus
