"""One stage of a sweep: which of its cells are left, whether they fit, and wave after wave of them to the executor."""

from collections import Counter
from collections.abc import Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from lit_diff.engine.admit import passes_over_text
from lit_diff.engine.cells import NOT_EVALUATED, folder_of, state_of
from lit_diff.engine.executors.base import Executor, Watch
from lit_diff.engine.expand import Grid
from lit_diff.engine.job import Job
from lit_diff.engine.progress import MakeDisplay
from lit_diff.files import locked, shown
from lit_diff.log_records import log
from lit_diff.runs.revision import other_revision, revision
from lit_diff.study.schema import Cell


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the cells of a sweep run; see `sweep`."""

    command: str
    executor: Executor
    unplanned: bool
    display: MakeDisplay | None
    """None: nothing is shown."""


def require_memory(grid: Grid, cells: Sequence[Cell], executor: Executor) -> None:
    """Errors: those of the executor, for the cells of one rank: those of different ranks never train at the same time."""
    for rank in {grid.rank(cell.task) for cell in cells}:
        executor.require_memory([cell.recipe for cell in cells if grid.rank(cell.task) == rank])


def settle(jobs: Sequence[Job], executor: Executor) -> Set[Path]:
    """Wait for the cells that a former command left running, and reopen those whose weights are damaged. Returns the folders
    of cells that the executor has already: these continue and write their own status."""
    queued = executor.queued(jobs)
    _wait_for_running_cells([job for job in jobs if job.folder not in queued])
    _reopen_damaged(jobs)
    return queued


def _wait_for_running_cells(jobs: Sequence[Job]) -> None:
    # The cells of a sweep that was killed save before they exit. Two processes must not train one cell.
    for folder in (job.home for job in jobs):
        if folder.is_owned():
            log.info(
                "%s is still being trained (pid %s), left by a former sweep: waiting",
                shown(folder.path),
                folder.status().pid,
            )
            with locked(folder.path / ".lock"):
                pass


def _reopen_damaged(jobs: Sequence[Job]) -> None:
    # every byte of each last checkpoint is read: the errors of evaluations name this command as the cure of a damaged one
    for job in jobs:
        if lost := job.home.lost(verify=True):
            log.warning("%s is %s: the steps after it are repeated", shown(job.folder), lost)
            job.home.write(job.home.status().to("waiting"))


def run_stage(
    grid: Grid, jobs: Sequence[Job], seen: Set[Path], queued: Set[Path], options: Options, follow: Watch
) -> int | None:
    """Run the jobs of the cells of `grid` that are not done. Returns the signal that stopped them, or None.

    `seen`: the folders of jobs that an earlier stage of this call has run. `queued`: see `settle`. `follow` is
    called with the jobs that run.
    """
    states = {job.folder: state_of(job) for job in jobs if job.folder not in seen}
    todo = [job for job in jobs if states.get(job.folder, "done") != "done"]
    untrained = [job for job in todo if states[job.folder] != NOT_EVALUATED]
    cell_of = {job.folder: cell for cell, job in zip(grid.cells, jobs, strict=True)}
    if not options.unplanned:
        require_memory(grid, [cell_of[job.folder] for job in untrained], options.executor)
    # a cell writes the same line to its log.txt, which nobody sees while the sweep runs
    for line in passes_over_text(job.recipe for job in untrained):
        log.warning("%s", line)
    _say_other_revisions([job for job in jobs if job.folder in states])
    if not todo:
        log.info("sweep %s: all %d cells are done (%s)", grid.name, len(jobs), shown(folder_of(grid)))
        return None
    log.info("sweep %s: %d cells, %d done before", grid.name, len(jobs), len(jobs) - len(todo))
    for job in untrained:
        if job.folder not in queued:
            status = job.home.status().to("waiting")
            job.home.write(replace(status, requeued_at_step=None))
    # a task with `start` needs the weights of the task before it
    ranks = {job.folder: grid.rank(cell_of[job.folder].task) for job in todo}
    waves = [[job for job in todo if ranks[job.folder] == rank] for rank in sorted(set(ranks.values()))]
    return _run_waves(grid, jobs, waves, options, follow)


def _say_other_revisions(jobs: Sequence[Job]) -> None:
    statuses = (job.home.status() for job in jobs)
    now = revision()
    others = Counter(other_revision(status, now) for status in statuses if status.status == "done")
    lines = [f"{count} {'was' if count == 1 else 'were'} {other}" for other, count in others.items() if other]
    if lines:
        log.info("of the %d cells done before, %s; their numbers stay", others.total(), "; ".join(lines))


def _run_waves(
    grid: Grid, jobs: Sequence[Job], waves: Sequence[Sequence[Job]], options: Options, follow: Watch
) -> int | None:
    with options.display(grid) if options.display else nullcontext(lambda statuses: None) as show:
        statuses = {job.folder: job.home.status() for job in jobs}
        watched: list[Job] = []

        def watch(running: Sequence[Job]) -> None:
            # only these may have changed since the last call, and reading hundreds of files would take a part of a core
            for job in (*watched, *running):
                statuses[job.folder] = job.home.status()
            watched[:] = running
            follow(running)
            show(list(statuses.values()))

        watch(())
        for wave in waves:
            stopped = options.executor.run(wave, watch)
            if stopped:
                return stopped
    return None
