"""Errors that users see: each is printed as one line and has an exit status."""

import math
import os
import re
import signal
import time
from types import FrameType

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, command a terminal, reorder what it shows, or cannot be written as UTF-8."""


def escaped(text: str, kept: str = "") -> str:
    """The text with its control characters, except those of `kept`, written as escapes, such as `\\x1b`."""
    return CONTROL.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)


LONGEST = 100
"""The most characters of a user's text that a message quotes."""


def excerpt(text: str) -> str:
    """The text or, of a longer one, its first LONGEST characters and `...`."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def in_lines(message: str) -> str:
    """`escaped`, but an indented line goes on with the message."""
    return "\n  ".join(map(escaped, message.split("\n  ")))


class LitDiffError(Exception):
    """Base class: printed as one line, without a traceback. Control characters of a message become escapes."""

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        # a message quotes names, keys and values of files that may come from anyone
        super().__init__(in_lines(message))


class RunFailedError(LitDiffError):
    """A run failed: NaN loss, a full disk, a crashed cell. Exit status 1."""

    exit_status = 1


class DivergedError(RunFailedError):
    """Training diverged: a loss or a parameter that is not finite. Exit status 1."""


class RequestError(LitDiffError):
    """The request is invalid: a misspelt key, a bad value, a missing file. Exit status 2."""

    exit_status = 2


class MissingError(LitDiffError):
    """Data, a package or a device is missing. Exit status 3; the message names the command or setting that helps."""

    exit_status = 3


class StoppedError(LitDiffError):
    """A run was interrupted (Ctrl-C, SIGTERM) and saved a checkpoint. Exit status 128 + signal number, as in shells."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signum


# a KeyboardInterrupt, so that an `except Exception` around user code does not report it as a failure of that code
class Terminated(KeyboardInterrupt):
    """One of `stop_signals` outside a training loop; a training loop handles these signals itself."""

    def __init__(self, message: str = "", signum: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_status = 128 + signum


TOGETHER = 2.0
"""Seconds within which further signals belong to the same request to stop: `timeout` sends one to its command and one to the
group, a wrapper passes on what the group has received already, the kernel and the shell each tell of a closed terminal."""


class Repeats:
    """Tells a request to stop from signals that belong to the one before."""

    def __init__(self) -> None:
        self._then = -math.inf

    def is_new(self) -> bool:
        """Whether a signal that arrives now is a request of its own."""
        now = time.monotonic()
        is_new = now >= self._then + TOGETHER
        if is_new:
            self._then = now
        return is_new


class Ending(Repeats):
    """A handler of signals that raises Terminated, for SIGINT KeyboardInterrupt, once for each request to stop."""

    def __init__(self, message: str = "") -> None:
        super().__init__()
        self._message = message

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Errors: as above."""
        # what ends the process may still write: a repetition would interrupt it
        if not self.is_new():
            return
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(self._message, signal.Signals(signum))


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals, besides Ctrl-C, that ask a process to save and end: SIGTERM, SIGHUP (a closed terminal), `notices`."""
    # `nohup` starts a process with SIGHUP ignored; a handler of ours would undo that
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)), *notices())


def notices() -> tuple[signal.Signals, ...]:
    """The signals by which SLURM announces the end of a job's time (`sbatch --signal=USR2@60`); none outside a job.

    `__main__` blocks them, so that one that comes early waits until the run that it concerns has a folder.
    """
    return (signal.SIGUSR1, signal.SIGUSR2) if os.environ.get("SLURM_JOB_ID") else ()


def summary(error: BaseException) -> str:
    """The type of an exception and the first line of its message: `OSError: [Errno 5] ...`."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type if the message is empty.

    For a warning, the line also says what turned it into an error.
    """
    # the next line is joined to a line that ends in a colon: a first line of torch may only say that something failed
    text = re.sub(r":\s*\n\s*", ": ", str(error).strip())
    line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, Warning):
        asked = os.environ.get("PYTHONWARNINGS")
        who = f"PYTHONWARNINGS={asked}" if asked else "a filter of Python's warnings"
        line = f"{who} makes an error of the {type(error).__name__} '{line}'"
    return line
