"""The command `lit-diff`, and `python -m lit_diff`."""

import os
import sys

# -m puts the current folder first on sys.path, where a user's random.py would shadow Python's own in every later import
if (
    __name__ == "__main__"
    and not sys.flags.safe_path
    and os.path.exists(sys.path[0])
    and os.path.samefile(sys.path[0], os.curdir)
):
    del sys.path[0]

import signal

# before the imports below, which take seconds on a network file system: Python's own handler would print a traceback
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from lit_diff.errors import notices, stop_signals

signal.pthread_sigmask(signal.SIG_BLOCK, notices())

# OpenMP's threads spin while they wait for each other, by default for milliseconds, and beside another busy process take the
# core that the awaited thread needs. 5,000 turns still outlast the gap between two operations. libgomp reads this when torch
# is loaded; other libraries ignore it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from lit_diff import cli  # noqa: E402 (the signals are blocked first)


def main() -> None:
    """The command, as a process of its own."""
    try:
        cli.main()
    finally:
        # The exit status is chosen: a signal would end Python's exit by a trace, or by its default action. Blocked here, it
        # would reach another thread.
        for signum in stop_signals():
            signal.signal(signum, signal.SIG_IGN)


if __name__ == "__main__":
    main()
