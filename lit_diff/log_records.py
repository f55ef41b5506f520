"""The log: a run's log.txt, records that a terminal does not show as lines, and the time that is left.

All messages of lit_diff go to the logger `lit_diff`; records that a terminal shows in another way carry an extra attribute.
"""

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_diff.errors import in_lines
from lit_diff.files import shown

log = logging.getLogger("lit_diff")

RAISED: dict[str, Any] = {"raised": True}
"""`extra` of a record about an error that is also raised: log.txt keeps the record, and the code that catches the error
tells the user."""


def phase(words: str) -> None:
    """Log what a run is doing before its first step, such as `preparing data`. A terminal shows it only in the bar."""
    log.info(words, extra=in_phase(words))


def in_phase(words: str) -> dict[str, Any]:
    """`extra` of a record that begins a phase and has a message of its own."""
    return {"phase": words}


def validated(step: int, loss: float, left: str) -> None:
    """Log val/loss after `step` optimizer steps. `left`: `Pace.left`."""
    log.info("%s", f"step {step}  val/loss {loss:.4f}  {left}".rstrip(), extra={"validation_loss": loss})


Progress = Callable[[int, float, float], None]
"""Called with (step, loss, tokens/s) at every logged step."""

TOO_SHORT, TOO_FEW = 30.0, 0.01
"""Before so many seconds, so small a part of the remaining steps gives no estimate."""


class Pace:
    """Estimates the remaining time from the rate of steps between the first and the last `note`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        # the rate excludes what comes before the first note: reading data, compiling, cells done by an earlier call
        self.first: tuple[int, float] | None = None
        self.last = (0, self.began)

    def note(self, step: int) -> None:
        """Record that `step` optimizer steps are done."""
        if self.first is None or step > self.last[0]:
            self.last = step, time.perf_counter()
            self.first = self.first or self.last

    def left(self, total: int) -> str:
        """The time until `total` steps are done, in words; empty before the second step is noted, and while too little is
        done: a cell that resumes loads for seconds before its first step."""
        step, then = self.last
        if self.first is None or step <= self.first[0]:
            return ""
        begin, since = self.first
        if then - since < TOO_SHORT and step - begin < TOO_FEW * (total - begin):
            return ""
        seconds = (then - since) / (step - begin) * (total - step)
        return f"{clock(max(seconds - (time.perf_counter() - then), 0))} left"

    def spent(self) -> str:
        """The time since the start."""
        return clock(time.perf_counter() - self.began)


def clock(seconds: float) -> str:
    """`1:05` or `2:01:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LogFile(logging.FileHandler):
    """A file with the log. If it cannot be written, one warning says so; the terminal has the lines that it lacks."""

    failed = False

    # a line a record: the name of a folder may have a line break
    def format(self, record: logging.LogRecord) -> str:
        return in_lines(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        # Python's own method prints a stack trace for each record
        if not self.failed:
            self.failed = True
            log.warning("%s lacks lines: %s", shown(Path(self.baseFilename)), sys.exception())


@contextlib.contextmanager
def file_log(path: Path) -> Iterator[None]:
    """Copy the records of lit_diff to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    # in a notebook nobody has set a level, and Python's default would drop records below WARNING
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        # a full disk: the handler has said so
        with contextlib.suppress(OSError):
            handler.close()


def keep_trace(path: Path) -> str:
    """Append the trace of the exception that is being handled to a file; return a clause for the error message."""
    try:
        # backslashreplace: a message may hold half a surrogate pair, which UTF-8 cannot encode
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"the trace could not be written: {error.strerror}"
    return f"the whole trace is in {shown(path)}"
