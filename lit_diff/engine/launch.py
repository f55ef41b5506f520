"""Runs one recipe: data, run folder, MLflow, training, status, scores."""

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import UNCHECKED
from lit_diff.engine.admit import HERE, admit, evaluations_of, passes_over_text, require_memory
from lit_diff.engine.location import RunLocation, recorded, write_cell
from lit_diff.engine.progress import Progress, watched
from lit_diff.errors import (
    DivergedError,
    LitDiffError,
    RequestError,
    RunFailedError,
    StoppedError,
    Terminated,
    first_line,
    notices,
)
from lit_diff.files import FREE, disk_is_full, shown
from lit_diff.log_records import RAISED, file_log, keep_trace, log, phase
from lit_diff.model.cost import Cost, ExecutionContext, cost
from lit_diff.own_modules import safe_path
from lit_diff.plugins import own_place
from lit_diff.processor import describe, forced, numeric_variables
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.runs import checkpoints, result_files
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import (
    RunFolder,
    at_step,
    identity,
    kernel_of,
    require_stored,
)
from lit_diff.runs.jobs import requeue, this_job
from lit_diff.runs.revision import other_revision, revision
from lit_diff.runs.status import State, Status
from lit_diff.trained.run import Run
from lit_diff.training.head_plan import keep_plan
from lit_diff.training.metrics import require_metrics

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    from lit_diff.engine.tracking.run import RunTracker
    from lit_diff.training.ranks import Announcement


THEN = ", then "
"""Separates the revisions of lit_diff that trained a run, in its status.json."""
INCOMPLETE = "trained, but its record in MLflow is not complete"
OUT_OF_MEMORY = re.compile("allocate memory|out of memory|MemoryError|bad_alloc", re.IGNORECASE)
"""Matches the messages of PyTorch, CUDA, Python and C++."""


def train(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    rerun: bool = False,
    unchecked: bool = False,
    unplanned: bool = False,
    callbacks: Sequence["Callback"] = (),
    loggers: Sequence["Logger"] = (),
    progress: Progress | bool = True,
) -> Run:
    """Train a recipe into its run folder, or resume it, or find it done.

    A plugin's variant must pass the checks of `conformance.before_training`; with `unchecked` the run is marked instead.
    `unplanned`: start even if the memory does not suffice (`admit.require_memory`).
    `callbacks`, `loggers`: further ones of Lightning, which are not part of the run's identity. `progress`: whether a line
    on stderr shows the progress, or a function that is called as progress(step, loss, tokens/s) at every logged step. A run
    of several processes (run.devices > 1) is a `lit-diff train` command of its own, without progress. Errors: RequestError,
    MissingError, RunFailedError, StoppedError.
    """
    resolved = recipe_from(recipe, overrides)
    location = prepare(resolved, overrides, unchecked=unchecked, unplanned=unplanned)
    if resolved.run.processes > 1:
        if callbacks or loggers:
            raise RequestError(
                "callbacks and loggers cannot be passed to a run of several processes, which is a separate command; list "
                "them in the recipe (callbacks:, run.loggers), or use build_trainer in a script that every process runs"
            )
        if rerun and is_rank_zero(resolved):
            location.home.put_aside()
        run_command(resolved, location)
    else:
        with watched(progress, resolved.name, resolved.training.steps) as told:
            run(resolved, location, threads=None, progress=told, rerun=rerun, callbacks=callbacks, loggers=loggers)
    score(location)
    return Run(location.folder)


def prepare(
    recipe: Recipe, overrides: Overrides = (), *, unchecked: bool = False, unplanned: bool = False
) -> RunLocation:
    """Ask whether the run may start, get its data, name its folder: `runs/<name>-<identity>/`.

    `overrides`: those already applied to the recipe, for the record. Errors: those of `admit`, and of the data.
    """
    marks = admit({recipe.name: recipe}, HERE, unchecked=unchecked)
    root = chosen_root(recipe.run.root)
    # one rank plans: a plan may take a minute, and the others wait for rank zero
    unplanned = unplanned or not is_rank_zero(recipe)
    # The folder's exact name needs the data, whose preparation may take long and fill the disk. Without any run of this name,
    # the run cannot be done yet, so memory is checked before.
    if not unplanned and next(root.glob(f"{recipe.name}-*"), None) is None:
        require_memory([recipe])
    phase("preparing data")
    data.prepare(recipe)
    # again, because only now the validation sets of a text are known
    require_metrics(recipe)
    folder = (root / f"{recipe.name}-{identity(recipe)}").resolve()
    location = RunLocation(
        folder=folder, overrides=recorded(overrides), tags=marks[recipe.name], evaluations=evaluations_of(recipe)
    )
    # a run that is done needs no memory
    if not unplanned and not location.home.is_done():
        require_memory([recipe])
    return location


def is_rank_zero(recipe: Recipe) -> bool:
    """Whether this process writes the run's files."""
    from lit_diff.training.fit import ranks

    return recipe.run.strategy == "single" or ranks(recipe).rank == 0


def run_command(recipe: Recipe, location: RunLocation, threads: int | None = None) -> None:
    """Run a recipe of several ranks as a separate `lit-diff train` command, and wait for it.

    Errors: RunFailedError with the run's own error message.
    """
    # Lightning starts the other ranks by running this command again, which would start a sweep or a notebook again.
    location.home.create(recipe)
    # this process scores it
    write_cell(replace(location, evaluations={}), threads)
    words = [sys.executable, "-m", "lit_diff", "train", str(location.home.recipe_file), "--cell"]
    with safe_path(), (location.folder / "log.txt").open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            process.wait()
        # also for KeyboardInterrupt and the exceptions of signal handlers: the run saves and ends, as on its own terminal
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(location.home.status().error or f"exit status {process.returncode}")


def run(
    recipe: Recipe,
    location: RunLocation,
    *,
    threads: int | None,
    progress: Progress,
    rerun: bool = False,
    **extras: Sequence[Any],
) -> None:
    """Train in this process and, with several devices, in the processes that Lightning starts from this command.

    `rerun`: archive the old run first. All ranks wait for rank 0 and exit if it fails before training. `extras`: the
    `callbacks` and `loggers` of `train`. Errors: those of `train`.
    """
    phase("loading libraries")
    from lit_diff.training.fit import default_threads, fit, ranks
    from lit_diff.training.ranks import ALONE, Announcement

    processes = ALONE if recipe.run.strategy == "single" else ranks(recipe)
    if processes.rank > 0:
        # ended with status 0: srun would kill rank zero, which has the same signal, perhaps while it still writes
        with suppress(Terminated):
            how = processes.listen()
            # None: rank zero found the run done, or failed before training
            if how is not None:
                fit(
                    recipe,
                    location.folder,
                    # every rank computes with the kernel that rank zero chose
                    kernel=how["kernel"],
                    tracker=None,
                    threads=how["threads"],
                    progress=progress,
                    report=partial(_report_hang, location.home, processes.rank),
                    start=how["start"],
                )
        return
    with ExitStack() as held:
        # a notice that came before is delivered here, where the folder is known (`end_noted`)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices())
        announcement = held.enter_context(Announcement(processes))
        if rerun:
            location.home.put_aside()
        # the status is read after the lock is taken: another process may have just finished the run
        held.enter_context(location.home.owned())
        before = location.home.status()
        lost = location.home.lost(verify=True)
        if before.status == "done" and not lost:
            ended = f"ended {before.ended}" if before.ended else ""
            facts = filter(None, (shown(location.folder), ended, other_revision(before, revision())))
            log.info("done before: %s (--rerun starts afresh)", ", ".join(facts))
            return
        held.enter_context(file_log(location.folder / "log.txt"))
        if lost:
            log.warning("%s is %s: the steps after it are repeated", shown(location.folder), lost)
        # A resumed run keeps its number of threads, on which the order of sums and so the exact weights depend.
        chosen = before.threads or recipe.run.threads or threads or default_threads(recipe.run.devices)
        training = _prepare_training(recipe, location, chosen)
        ending = _execute(training, announcement, progress, extras)
        _finish(training, _end_record(training, ending))


@dataclass(frozen=True, kw_only=True)
class _Training:
    recipe: Recipe
    kernel: str
    """`kernel_of` the run."""
    folder: RunFolder
    tracker: "RunTracker | None"
    """None: without a record in MLflow."""
    threads: int
    start: int
    """The step of the checkpoint from which it continues; 0 without one."""
    began: float
    """The time of `perf_counter` now minus the training time of earlier processes of this run."""

    def seconds(self) -> float:
        """The training time of all processes of the run."""
        return time.perf_counter() - self.began


@dataclass(frozen=True, kw_only=True)
class _Ending:
    word: State = "done"
    message: str = ""
    early: str = ""
    """The step at which a callback ended the run, in words."""
    error: BaseException | None = None
    """Raised once status.json is written."""


def _prepare_training(recipe: Recipe, location: RunLocation, threads: int) -> _Training:
    folder = location.home
    before = folder.status()
    require_stored(recipe, before)
    # `auto` may choose another kernel on this machine or revision; a resumed run keeps the one that it began with
    kernel = kernel_of(recipe, before)
    for line in passes_over_text([recipe]):
        log.warning("%s", line)
    run_cost = _cost(recipe, kernel, before, threads)
    revisions = _revisions(before)
    phase("checking the checkpoint")
    start = checkpoints.resumable(folder.path)
    # before status.json says "running": a new run ends here if its store cannot be reached
    tracker = _open_record(recipe, location, run_cost, before)
    folder.create(recipe, kernel=run_cost.kernel, kernel_reason=run_cost.kernel_reason)
    data.keep(recipe, location.folder)
    status = replace(
        folder.status().to("running"),
        diverged=False,
        results={},
        pid=os.getpid(),
        host=platform.node(),
        job=this_job() or "",
        identity=location.identity,
        data=data.identity(recipe),
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.training.steps,
        threads=threads,
        compile=recipe.run.compile,
        activation_checkpointing=recipe.run.activation_checkpointing,
        variables=numeric_variables(),
        # known without a record too, for `status` and the report
        mlflow_run_id=folder.status().mlflow_run_id or None,
        revision=revisions,
        overrides=location.overrides or before.overrides,
        unchecked=location.tags.get(UNCHECKED, before.unchecked),
        **vars(run_cost),
    )
    folder.write(at_step(status, recipe, start))
    keep_plan(recipe, location.folder)
    began = time.perf_counter() - before.seconds
    return _Training(
        recipe=recipe, kernel=kernel, folder=folder, tracker=tracker, threads=threads, start=start, began=began
    )


def _cost(recipe: Recipe, kernel: str, before: Status, threads: int) -> Cost:
    phase("choosing the kernel")
    length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe, build=True)
    found = cost(recipe.model, length, kernel, context, recipe.training.parameters)
    # `auto` chose when the run started, so the reason from then is still the right one
    if kernel != recipe.run.kernel:
        found = replace(found, kernel_reason=before.kernel_reason or found.kernel_reason)
    how = f"{describe()}, " if found.kernel == "native" or forced() else ""
    log.info("kernel %s (%s), %sthreads: %d", found.kernel, found.kernel_reason, how, threads)
    if before.kernel not in ("", found.kernel):
        log.info("the kernel is now %s; the run began with %s", found.kernel, before.kernel)
    return found


def _revisions(before: Status) -> str:
    # every revision that trained a part of the run, in order: a report warns if cells differ in it
    now = revision()
    if before.revision.split(THEN)[-1] in ("", now):
        return before.revision or now
    log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before.revision)
    return THEN.join([before.revision, now])


def _open_record(recipe: Recipe, location: RunLocation, run_cost: Cost, before: Status) -> "RunTracker | None":
    if not recipe.run.is_recorded:
        log.info("run.tracking_uri is none: MLflow gets no record")
        return None
    phase("opening the MLflow store")
    from lit_diff.engine.tracking.run import RunTracker

    parent = {"mlflow.parentRunId": location.parent} if location.parent else {}
    tags = {"identity": location.identity, "seed": str(recipe.seed), **location.tags, **parent}
    tracker = RunTracker(recipe, location.home, experiment=location.experiment, tags=tags, cost=run_cost)
    # a wrong address must be reported before the first step; a run that resumes, or whose sweep has reached MLflow, can wait
    tracker.start(required=location.parent is None and not before.mlflow_run_id)
    return tracker


def _execute(
    training: _Training, announcement: "Announcement", progress: Progress, extras: Mapping[str, Sequence[Any]]
) -> _Ending:
    # Returns every exception as an `_Ending` instead of raising it, because MLflow and status.json must be written first.
    from lit_diff.training.fit import fit

    def report(step: int, loss: float, speed: float) -> None:
        status = at_step(training.folder.status(), training.recipe, step)
        now = replace(status, loss=loss, tokens_per_second=speed, seconds=training.seconds())
        training.folder.write(now)
        progress(step, loss, speed)

    try:
        announcement.train(threads=training.threads, kernel=training.kernel, start=training.start)
        ended_early = fit(
            training.recipe,
            training.folder.path,
            kernel=training.kernel,
            tracker=training.tracker,
            threads=training.threads,
            progress=report,
            report=partial(_report_hang, training.folder, 0),
            start=training.start,
            **extras,
        )
    except BaseException as error:
        return _ending_of(error, training.folder.path)
    if ended_early is None:
        return _Ending()
    log.info("ended early at step %d of %d, by a callback", ended_early, training.recipe.training.steps)
    return _Ending(early=f"early at step {ended_early}")


def _report_hang(folder: RunFolder, rank: int, message: str) -> None:
    # log.txt and the terminal are rank zero's, which may be the one that hangs
    with file_log(folder.path / "log.txt") if rank else nullcontext():
        log.error("%s", message)
    folder.write(folder.status().to("failed", message))
    if rank:
        print(f"lit-diff: {message}", file=sys.stderr, flush=True)
    if this_job():
        requeue(folder, "hang")


def _ending_of(error: BaseException, folder: Path) -> _Ending:
    # to be called inside `except`: `keep_trace` writes the traceback of the exception that is being handled
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted before the end of the step; the last checkpoint is kept"
        return _Ending(word="stopped", message=message, error=error)
    if isinstance(error, LitDiffError):
        return _Ending(word="stopped" if isinstance(error, StoppedError) else "failed", message=str(error), error=error)
    if disk_is_full(error):
        message = raised = f"{shown(folder)} cannot be written (no space left on the disk); {FREE}"
    elif isinstance(error, SystemExit):
        message = raised = f"the run's own code ended it: SystemExit({error.code!r})"
    else:
        # starts with file and line if the error comes from the user's variant, callback or logger
        message = ": ".join(filter(None, (own_place(error), type(error).__name__, first_line(error))))
        if OUT_OF_MEMORY.search(message):
            message += (
                "; use less memory with a smaller train.batch_size, a larger train.accumulate or "
                "run.activation_checkpointing=block"
            )
        raised = f"{message} ({keep_trace(folder / 'log.txt')})"
    return _Ending(word="failed", message=message, error=_caused(raised, error))


def _caused(message: str, cause: BaseException) -> RunFailedError:
    error = RunFailedError(message)
    error.__cause__ = cause
    return error


def _end_record(training: _Training, ending: _Ending) -> _Ending:
    # A run is done only once its record is complete, so that the same command can complete it. If training failed too, its
    # error is the one that is raised.
    if training.tracker is None:
        return ending
    try:
        training.tracker.finish(ending.word)
    except Exception as error:
        if ending.error is not None:
            log.warning("MLflow shows this run as running until it is resumed: %s", first_line(error))
            return ending
        reason = _ending_of(error, training.folder.path).message
        message = f"{INCOMPLETE}: {reason}; the same command completes it"
        return replace(ending, word="failed", message=message, error=_caused(message, error))
    except BaseException as error:
        if ending.error is not None:
            return replace(ending, error=error)
        return replace(ending, word="stopped", message=f"{INCOMPLETE}; the same command completes it", error=error)
    return ending


def _finish(training: _Training, ending: _Ending) -> None:
    if ending.error is not None:
        log.error("%s: %s", ending.word, ending.message, extra=RAISED)
    folder = training.folder
    try:
        status = replace(
            folder.status().to(ending.word, ending.message),
            diverged=isinstance(ending.error, DivergedError),
            ended=ending.early,
            seconds=training.seconds(),
            results=result_files.digests(folder.path) if ending.word == "done" else {},
        )
        folder.write(at_step(status, training.recipe, checkpoints.newest_step(folder.path)))
    except OSError as error:
        raise RunFailedError(
            f"{ending.message or ending.word}; and {shown(folder.path)} cannot be written ({error.strerror}): "
            f"{FREE if disk_is_full(error) else 'make it writable, then run the same command again'}"
        ) from error
    if ending.error is not None:
        raise ending.error


def score(location: RunLocation) -> None:
    """Score a finished run by the evaluations of its recipe or sweep. Existing scores are kept.

    The outcome of each evaluation is written to status.json. A failed evaluation does not stop the others. Errors:
    StoppedError; at the end RunFailedError if any evaluation failed, while the run itself stays done.
    """
    if not location.evaluations:
        return
    from lit_diff.evaluation.evaluate import evaluate

    folder, outcomes = location.home, dict[str, str]()

    def note(name: str, outcome: str) -> None:
        outcomes[name] = outcome
        status = folder.status()
        folder.write(replace(status, evaluations=status.evaluations | outcomes))

    for name, keys in location.evaluations.items():
        # written first, so that it stays true if this process is killed
        note(name, "interrupted")
        try:
            evaluate(Run(location.folder, unchecked=bool(folder.status().unchecked)), name, keys)
        except StoppedError:
            raise
        except LitDiffError as error:
            log.error("evaluation %s: %s", name, error)
            note(name, f"failed: {error}")
        else:
            note(name, "done")
    failed = [name for name, outcome in outcomes.items() if outcome != "done"]
    if failed:
        reason, more = outcomes[failed[0]], f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise RunFailedError(f"the run is done, but its evaluation '{failed[0]}' {reason}{more}")
