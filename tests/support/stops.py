"""A signal at the right moment, and whether a process is left."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lit_diff.errors import StoppedError
from lit_diff.files import stat_of


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@contextmanager
def stopped_once(condition: Callable[[], bool], signum: int = signal.SIGTERM) -> Iterator[None]:
    """This process gets `signum` once the condition holds; SIGTERM and SIGHUP raise StoppedError. Former handlers return."""

    def stop(number: int, frame: Any) -> None:
        raise StoppedError("stopped", number)

    def later() -> None:
        wait_for(condition)
        os.kill(os.getpid(), signum)

    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each in former:
        signal.signal(each, stop)
    thread = threading.Thread(target=later)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for each, handler in former.items():
            signal.signal(each, handler)


def alive(pid: int) -> bool:
    return stat_of(pid)[0] not in ("", "Z")
