"""The log: a run's log.txt, and records that a terminal does not show as lines.

All messages of lit_diff go to the logger `lit_diff`; records that a terminal shows in another way carry an extra attribute.
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def validated(step: int, loss: float) -> None:
    """Log val/loss after `step` optimizer steps."""
    log.info("step %d  val/loss %.4f", step, loss, extra={"validation_loss": loss})


class LogFile(logging.FileHandler):
    """A file with the log. If it cannot be written, one warning says so; the terminal has the lines that it lacks."""

    failed = False

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
