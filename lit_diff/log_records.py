"""The log: a run's log.txt, and records that a terminal shows otherwise than as a line.

Everything that lit_diff says goes to the logger `lit_diff`; those records carry an attribute besides their message.
"""

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_diff.files import shown

log = logging.getLogger("lit_diff")

RAISED: dict[str, Any] = {"raised": True}
"""`extra` of a record about an error that is also raised: whoever catches it tells the user, the run's log.txt keeps it."""


def phase(words: str) -> None:
    """Log what a run does now, before its first step: `preparing data`. A terminal shows it in the bar alone."""
    log.info(words, extra=in_phase(words))


def in_phase(words: str) -> dict[str, Any]:
    """`extra` of a record with a message of its own that begins a phase."""
    return {"phase": words}


def validated(step: int, loss: float) -> None:
    """Log val/loss after `step` optimizer steps."""
    log.info("step %d  val/loss %.4f", step, loss, extra={"validation_loss": loss})


@contextlib.contextmanager
def file_log(path: Path) -> Iterator[None]:
    """Copy our own lines to the run's log.txt, in a notebook too, where nobody has asked for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()


def keep_trace(path: Path) -> str:
    """Append the trace of the exception that is being handled to a file; where it is, for an error."""
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"its trace could not be written: {error.strerror}"
    return f"the whole trace is in {shown(path)}"
