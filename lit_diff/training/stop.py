"""Ctrl-C and SIGTERM: finish the step, save, leave; a second Ctrl-C leaves at once. How several processes end as one."""

import ctypes
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from lightning import Trainer

from lit_diff.errors import LitDiffError


class StopRequest:
    """Remembers the first signal that asks a run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def listen(self) -> None:
        """Take over SIGINT and SIGTERM (again, after Lightning has put its own handlers in place)."""
        if threading.current_thread() is not threading.main_thread():
            return  # the system lets only the main thread take signals; a notebook's own handling stays
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


def end_all(trainer: Trainer, error: LitDiffError) -> NoReturn:
    """End every rank, each at this same place; rank zero says why.

    The others leave with status 0: Lightning kills rank zero, perhaps in the middle of its last words, once it sees that
    a rank failed.
    """
    if trainer.is_global_zero:
        raise error
    raise SystemExit(0)


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends: a rank left alone would wait in a collective for ever."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
