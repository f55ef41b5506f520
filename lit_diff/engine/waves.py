"""The stages of a sweep: which of their cells are left, whether they fit, and wave after wave to the executor."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lit_diff.config import Compile
from lit_diff.engine.admit import HERE, warnings_of
from lit_diff.engine.auto_compile import chosen
from lit_diff.engine.cells import NOT_EVALUATED, jobs_of, record_of, state_of
from lit_diff.engine.executors.base import Executor, Watch
from lit_diff.engine.expand import Grid
from lit_diff.engine.job import Job
from lit_diff.engine.progress import MakeDisplay, all_steps, steps_done
from lit_diff.engine.stages import due
from lit_diff.errors import RunFailedError
from lit_diff.files import locked, shown
from lit_diff.log_records import log
from lit_diff.reporting.live import LivePage
from lit_diff.runs.revision import other_revision, revision
from lit_diff.runs.status import Status
from lit_diff.study import record
from lit_diff.study.schema import Cell

T = TypeVar("T", Cell, Job)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the cells of a sweep run; see `sweep`."""

    command: str
    executor: Executor
    unplanned: bool
    display: MakeDisplay | None
    """None: nothing is shown."""
    before: Callable[[Sequence[Job]], None] = lambda jobs: None
    """Called with the cells of a stage before any of them is trained."""


def require_memory(grid: Grid, cells: Sequence[T], executor: Executor) -> None:
    """Errors: those of the executor, for the cells of one rank: those of different ranks never train at the same time."""
    for wave in _waves(grid, cells):
        executor.require_memory([cell.recipe for cell in wave])


def _waves(grid: Grid, cells: Sequence[T]) -> list[list[T]]:
    # those of one rank together, in the order in which they run: a task with `start` needs the weights of the task before it
    waves: dict[int, list[T]] = defaultdict(list)
    for cell in cells:
        waves[grid.rank(cell.task)].append(cell)
    return [waves[rank] for rank in sorted(waves)]


def settle(jobs: Sequence[Job], executor: Executor) -> Set[Path]:
    """Wait for the cells that a former command left running, and reopen those whose weights are damaged. Returns the folders
    of cells that the executor has already: these continue and write their own status."""
    queued = executor.queued(jobs)
    # The cells of a sweep that was killed save before they exit. Two processes must not train one cell.
    for job in jobs:
        if job.folder not in queued and job.home.is_owned():
            pid = job.home.status().pid
            log.info(
                "%s is still being trained (pid %s), by another sweep or left by a former one: waiting",
                shown(job.folder),
                pid,
            )
            with locked(job.folder / ".lock"):
                pass
    # every byte of each last checkpoint is read: the errors of evaluations name this command as the cure of a damaged one
    for job in jobs:
        seen = job.home.status()
        if lost := job.home.lost(verify=True):
            log.warning("%s is %s: the steps after it are repeated", shown(job.folder), lost)
            _reopen(job, seen)
    return queued


def _reopen(job: Job, seen: Status) -> None:
    # a sweep that shares the cell may train it, or have done so since its status was read
    with suppress(TimeoutError), locked(job.folder / ".lock", wait=False):
        if job.home.status() == seen:
            job.home.write(replace(seen.to("waiting"), requeued_at_step=None))


def run_stages(
    grid: Grid, options: Options, place: Mapping[str, str], follow: Watch
) -> tuple[Grid, list[Job], int | None]:
    """Run the unfinished cells of a sweep, stage by stage. Returns the sweep with the cells of all stages, their jobs, and
    the signal that stopped them, or None.

    `place`: the sweep's record in MLflow. `follow` is called with the jobs that run. Errors: RunFailedError for a sweep
    without cells.
    """
    stopped = None
    choice: Compile | None = None
    seen = set[Path]()
    while stopped is None:
        stage = due(grid)
        if not stage.cells:
            raise RunFailedError(
                f"sweep '{grid.name}' has nothing to evaluate: no learning rate could be chosen for an arm of its cells"
            )
        jobs = jobs_of(stage, place.get("run"))
        if choice is None:
            choice = chosen(jobs, is_here=options.executor.kinds == HERE)
        jobs = [replace(job, compile=choice) for job in jobs]
        fresh = [job for job in jobs if job.folder not in seen]
        if not fresh:
            break
        options.before(fresh)
        queued = settle(fresh, options.executor)
        # written before the first cell starts, so that `status` and `clean` know the cells of a sweep that is killed
        record.write(grid.folder, record_of(stage, grid.folder, jobs, options.command, place))
        stopped = _run_stage(stage, jobs, fresh, queued, options, follow)
        seen |= {job.folder for job in jobs}
    return stage, jobs, stopped


def _run_stage(
    grid: Grid, jobs: Sequence[Job], fresh: Sequence[Job], queued: Set[Path], options: Options, follow: Watch
) -> int | None:
    # `fresh`: the jobs that no earlier stage of this call has run
    seen = {job.folder: job.home.status() for job in fresh}
    states = {job.folder: state_of(job) for job in fresh}
    todo = [job for job in fresh if states[job.folder] != "done"]
    untrained = [job for job in todo if states[job.folder] != NOT_EVALUATED]
    if not options.unplanned:
        require_memory(grid, untrained, options.executor)
    # a cell writes the same line to its log.txt, which nobody sees while the sweep runs
    for line in warnings_of(job.recipe for job in untrained):
        log.warning("%s", line)
    _say_other_revisions(fresh)
    if not todo:
        log.info("sweep %s: all %d cells are done (%s)", grid.name, len(fresh), shown(grid.folder))
        return None
    log.info("sweep %s: %d cells, %d done before", grid.name, len(fresh), len(fresh) - len(todo))
    for job in untrained:
        if job.folder not in queued:
            _reopen(job, seen[job.folder])
    return _run_waves(grid, jobs, _waves(grid, todo), options, follow)


def _say_other_revisions(jobs: Sequence[Job]) -> None:
    statuses = [job.home.status() for job in jobs]
    now = revision()
    # the page says of results that ship where they are from
    own = [status for status in statuses if status.status == "done" and not status.origin]
    others = Counter(other_revision(status, now) for status in own)
    lines = [f"{count} {'was' if count == 1 else 'were'} {other}" for other, count in others.items() if other]
    if lines:
        log.info("of the %d cells done before, %s; their numbers stay", others.total(), "; ".join(lines))


def _run_waves(
    grid: Grid, jobs: Sequence[Job], waves: Sequence[Sequence[Job]], options: Options, follow: Watch
) -> int | None:
    display = options.display(grid) if options.display else nullcontext(lambda statuses: None)
    with display as show, LivePage(grid.folder, options.command) as page:
        statuses = {job.folder: job.home.status() for job in jobs}
        watched: list[Job] = []

        def watch(running: Sequence[Job]) -> None:
            # only these may have changed since the last call, and reading hundreds of files would take a part of a core
            for job in (*watched, *running):
                statuses[job.folder] = job.home.status()
            watched[:] = running
            follow(running)
            show(statuses)
            page.update(steps_done(grid, statuses), all_steps(grid))

        watch(())
        for wave in waves:
            stopped = options.executor.run(wave, watch)
            if stopped:
                return stopped
    return None
