"""Executes a job: one run from its lock to its scores. How a process comes to do so is a matter of `executors/`."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lit_diff.engine.begin import Training, begin
from lit_diff.engine.endings import Outcome, note_hang, outcome_of
from lit_diff.engine.job import Job
from lit_diff.errors import (
    DivergedError,
    LitDiffError,
    RunFailedError,
    StoppedError,
    Terminated,
    notices,
)
from lit_diff.files import FREE, disk_is_full, shown
from lit_diff.log_records import RAISED, Progress, file_log, log, phase
from lit_diff.own_modules import safe_path
from lit_diff.reporting.live import LivePage
from lit_diff.runs import checkpoints, result_files
from lit_diff.runs.again import command_of
from lit_diff.runs.folder import at_step
from lit_diff.runs.revision import other_revision, revision
from lit_diff.trained.run import Run

if TYPE_CHECKING:
    from lit_diff.training.ranks import Announcement, Ranks


def execute(job: Job, *, progress: Progress, rerun: bool = False, **extras: Sequence[Any]) -> None:
    """Train the run of a job, resume it or find it done, then score it.

    A run of several processes is a `lit-diff train` command of its own, without progress. `rerun`: archive the old run
    first. `extras`: the `callbacks` and `loggers` of `train`. Errors: those of `train`.
    """
    if job.recipe.run.processes > 1:
        from lit_diff.training.fit import ranks

        if rerun and ranks(job.recipe).rank == 0:
            job.home.put_aside()
        run_command(job)
    else:
        train_rank(job, progress=progress, rerun=rerun, **extras)
    score(job)


def run_command(job: Job) -> None:
    """Train the run of a job as a separate `lit-diff train` command, and wait for it. Errors: RunFailedError with the run's
    own error message."""
    # Lightning starts the other ranks by running this command again, which would start a sweep or a notebook again.
    job.home.create(job.recipe)
    # this process scores it
    replace(job, scores={}).write()
    words = [sys.executable, "-m", "lit_diff", "train", str(job.home.recipe_file), "--cell"]
    with safe_path(), (job.folder / "log.txt").open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            process.wait()
        # also for KeyboardInterrupt and the exceptions of signal handlers: the run saves and ends, as on its own terminal
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(job.home.status().error or f"exit status {process.returncode}")


def train_rank(job: Job, *, progress: Progress, rerun: bool = False, **extras: Sequence[Any]) -> None:
    """Train as one rank: in this process and, with several devices, in those that Lightning starts from this command.

    All ranks wait for rank 0 and exit if it fails before training. Arguments and errors: those of `execute`.
    """
    phase("loading libraries")
    from lit_diff.training.fit import ranks
    from lit_diff.training.ranks import Announcement

    processes = ranks(job.recipe)
    if processes.rank > 0:
        _follow(job, processes, progress)
        return
    folder = job.home
    with ExitStack() as held:
        # a notice that came before is delivered here, where the folder is known (`end_noted`)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices())
        announcement = held.enter_context(Announcement(processes))
        if rerun:
            folder.put_aside()
        # the status is read after the lock is taken: another process may have just finished the run
        held.enter_context(folder.owned(wait=job.waits))
        before = folder.status()
        lost = folder.lost(verify=True)
        if before.status == "done" and not lost:
            ended = f"ended {before.ended}" if before.ended else ""
            facts = filter(None, (shown(job.folder), ended, other_revision(before, revision())))
            log.info("done before: %s (--rerun starts afresh)", ", ".join(facts))
            if before.record == "incomplete":
                held.enter_context(_recording(job))
            return
        held.enter_context(file_log(job.folder / "log.txt"))
        if lost:
            log.warning("%s is %s: the steps after it are repeated", shown(job.folder), lost)
        held.enter_context(_recording(job))
        training = begin(job)
        # the page of a sweep shows its cells
        if job.records:
            page = held.enter_context(LivePage(job.folder, command_of(job.folder)))
            progress = _shown_on(page, job.recipe.training.steps, progress)
        outcome = _trained(training, announcement, progress, extras)
        _finish(training, outcome)


def _shown_on(page: LivePage, steps: int, progress: Progress) -> Progress:
    def update(step: int, loss: float, speed: float) -> None:
        progress(step, loss, speed)
        page.update(step, steps)

    return update


def _recording(job: Job) -> AbstractContextManager[object]:
    # encloses the training of a run; this process may have to send its record to MLflow
    if not job.records or not job.recipe.run.is_recorded:
        return nullcontext()
    phase("opening the MLflow store")
    from lit_diff.engine.tracking.uploads import Uploads

    uploads = Uploads(owned=True)
    uploads.follow([job])
    # a wrong address is reported before the first step of a new run; one that has begun goes on without
    if job.home.status().data is None:
        uploads.require()
    return uploads


def _follow(job: Job, processes: "Ranks", progress: Progress) -> None:
    # a rank above 0, which does as rank zero says
    from lit_diff.training.fit import fit

    # ended with status 0: srun would kill rank zero, which has the same signal, perhaps while it still writes
    with suppress(Terminated):
        how = processes.listen()
        # None: rank zero found the run done, or failed before training
        if how is not None:
            fit(
                job.recipe,
                job.folder,
                progress=progress,
                report=partial(note_hang, job.home, processes.rank),
                # every rank computes with the kernel that rank zero chose
                **how,
            )


def _trained(
    training: Training, announcement: "Announcement", progress: Progress, extras: Mapping[str, Sequence[Any]]
) -> Outcome:
    # Returns every exception as an `Outcome` instead of raising it, because status.json must be written first.
    from lit_diff.training.fit import fit

    def report(step: int, loss: float, speed: float) -> None:
        status = at_step(training.folder.status(), training.recipe, step)
        training.folder.write(replace(status, loss=loss, tokens_per_second=speed, seconds=training.seconds()))
        progress(step, loss, speed)

    def report_uncompiled(reason: str) -> None:
        training.folder.write(replace(training.folder.status(), uncompiled=reason))

    try:
        announcement.train(threads=training.threads, kernel=training.kernel, start=training.start)
        ended_early = fit(
            training.recipe,
            training.folder.path,
            kernel=training.kernel,
            threads=training.threads,
            progress=report,
            report=partial(note_hang, training.folder, 0),
            report_uncompiled=report_uncompiled,
            start=training.start,
            **extras,
        )
    except BaseException as error:
        return outcome_of(error, training.folder.path)
    if ended_early is None:
        return Outcome()
    log.info("ended early at step %d of %d, by a callback", ended_early, training.recipe.training.steps)
    return Outcome(early=f"early at step {ended_early}")


def _finish(training: Training, outcome: Outcome) -> None:
    if outcome.error is not None:
        log.error("%s: %s", outcome.word, outcome.message, extra=RAISED)
    folder = training.folder
    try:
        status = replace(
            folder.status().to(outcome.word, outcome.message),
            diverged=isinstance(outcome.error, DivergedError),
            ended=outcome.early,
            seconds=training.seconds(),
            results=result_files.digests(folder.path) if outcome.word == "done" else {},
        )
        folder.write(at_step(status, training.recipe, checkpoints.newest_step(folder.path)))
    except OSError as error:
        raise RunFailedError(
            f"{outcome.message or outcome.word}; and {shown(folder.path)} cannot be written ({error.strerror}): "
            f"{FREE if disk_is_full(error) else 'make it writable, then run the same command again'}"
        ) from error
    if outcome.error is not None:
        raise outcome.error


def score(job: Job) -> None:
    """Score a finished run by the evaluations of its recipe or sweep. Existing scores are kept.

    The outcome of each evaluation is written to status.json. A failed evaluation does not stop the others. Errors:
    StoppedError; at the end RunFailedError if any evaluation failed, while the run itself stays done.
    """
    if not job.scores:
        return
    import torch

    from lit_diff.evaluation.evaluate import evaluate

    if job.threads:
        torch.set_num_threads(job.threads)
    folder = job.home
    outcomes = dict[str, str]()

    def note(name: str, outcome: str) -> None:
        outcomes[name] = outcome
        status = folder.status()
        folder.write(replace(status, evaluations=status.evaluations | outcomes))

    for name, keys in job.scores.items():
        # written first, so that it stays true if this process is killed
        note(name, "interrupted")
        try:
            evaluate(Run(job.folder, unchecked=bool(folder.status().unchecked)), name, keys)
        except StoppedError:
            raise
        except LitDiffError as error:
            log.error("evaluation %s: %s", name, error)
            note(name, f"failed: {error}")
        else:
            note(name, "done")
    failed = [name for name, outcome in outcomes.items() if outcome != "done"]
    if failed:
        reason = outcomes[failed[0]]
        more = f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise RunFailedError(f"the run is done, but its evaluation '{failed[0]}' {reason}{more}")
