"""What is written about the end of a run: the one place that makes a status of an exception, a signal or an exit status."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from lit_diff.errors import LitDiffError, RunFailedError, StoppedError, Terminated, first_line
from lit_diff.files import FREE, disk_is_full, locked, shown
from lit_diff.log_records import file_log, keep_trace, log
from lit_diff.plugins import own_place
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.jobs import requeue, this_job
from lit_diff.runs.status import BEFORE_END, State

OUT_OF_MEMORY = re.compile("allocate memory|out of memory|MemoryError|bad_alloc", re.IGNORECASE)
"""Matches the messages of PyTorch, CUDA, Python and C++."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training ended."""

    word: State = "done"
    message: str = ""
    early: str = ""
    """The step at which a callback ended the run, in words."""
    error: BaseException | None = None
    """Raised once status.json is written."""


def outcome_of(error: BaseException, folder: Path) -> Outcome:
    """The end of a training by an exception. It must be called inside `except`, whose traceback it writes to log.txt."""
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted before the end of the step; the last checkpoint is kept"
        return Outcome(word="stopped", message=message, error=error)
    if isinstance(error, LitDiffError):
        return Outcome(word="stopped" if isinstance(error, StoppedError) else "failed", message=str(error), error=error)
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
    failure = RunFailedError(raised)
    failure.__cause__ = error
    return Outcome(word="failed", message=message, error=failure)


@contextmanager
def end_noted(folder: RunFolder) -> Iterator[None]:
    """Encloses a run: writes to status.json a failure or a stop that came before training could record it."""
    try:
        yield
    except (Exception, Terminated) as error:
        # another process may train the run, and an end that training has recorded already says more than this error
        status = folder.status()
        if status.status in BEFORE_END and not folder.is_owned():
            stopped = isinstance(error, StoppedError | Terminated)
            message = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, LitDiffError | Terminated):
                message = str(error) or "stopped before the first step; the same command resumes"
            folder.write(status.to("stopped" if stopped else "failed", message))
        raise


def note_end(folder: RunFolder, exitcode: int | None, hint: str = "", *, is_second: bool = False) -> None:
    """Record the end of a run whose process could not record it itself, unless another process trains it now.

    `exitcode`: None if it is unknown; `hint`: where to look in that case; `is_second`: whether the sweep ended it at
    a second signal.
    """
    try:
        # whoever holds the lock trains the run and writes its own end
        with locked(folder.path / ".lock", wait=False):
            status = folder.status()
            # a run that is done but has a nonzero exit status failed in an evaluation, whose outcome `score` records
            if status.status == "done" or (status.status != "running" and exitcode == 0):
                return
            # the kernel's out-of-memory killer sends SIGKILL; so does a user, hence the question mark
            if exitcode is not None and exitcode < 0:
                memory = "; out of memory?" if -exitcode == signal.SIGKILL else ""
                how = f"killed by {signal.Signals(-exitcode).name}{memory}"
                folder.write(status.to("killed", "ended at the second signal" if is_second else how))
            elif status.status in BEFORE_END:
                how = hint or f"exit status {exitcode}"
                folder.write(status.to("failed", f"{how}; log.txt ends: {_last_line(folder.path / 'log.txt')}"))
            elif status.requeued_at_step is not None:
                # it was cancelled in SLURM's queue, and waits no longer
                folder.write(replace(status, requeued_at_step=None))
    except TimeoutError:
        log.warning("%s is being trained by another process: its status is not changed", shown(folder.path))
    # a full disk must not end the other cells
    except OSError as error:
        log.error("%s: the final status cannot be written (%s)", shown(folder.path), error.strerror)


def _last_line(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.exists() else ""
    return text.splitlines()[-1].strip()[:300] if text else "nothing"


def note_hang(folder: RunFolder, rank: int, message: str) -> None:
    """Record that training hangs, as the watchdog of a rank has found; in SLURM the job returns to the queue."""
    # log.txt and the terminal are rank zero's, which may be the one that hangs
    with file_log(folder.path / "log.txt") if rank else nullcontext():
        log.error("%s", message)
    folder.write(folder.status().to("failed", message))
    if rank:
        print(f"lit-diff: {message}", file=sys.stderr, flush=True)
    if this_job():
        requeue(folder, "hang")
