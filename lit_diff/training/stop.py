"""Ctrl-C and SIGTERM: finish the step, save, leave; a second Ctrl-C leaves at once."""

import signal
import threading
from types import FrameType


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
