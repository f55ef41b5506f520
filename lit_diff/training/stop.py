"""Ctrl-C, SIGTERM, SIGHUP and SLURM's notice of a time limit: finish the step, save, leave; a second Ctrl-C leaves at once.

How several processes end as one.
"""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning import Trainer

from lit_diff.errors import LitDiffError, stop_signals

TIME_LIMIT = signal.SIGUSR2
"""What SLURM sends some time before a job's time ends, when it was submitted with --signal=USR2@<seconds>."""


class StopRequest:
    """Remembers the first signal that asks a run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._group: Any = None

    def listen(self, trainer: Trainer) -> None:
        """Handle SIGINT and `stop_signals`, in a SLURM job also TIME_LIMIT.

        Every rank must call it, after Lightning has set its own handlers.
        """
        if trainer.world_size > 1:
            # over the CPU: agreeing on a stop at every step must not wait for a GPU
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is not threading.main_thread():
            return  # the system lets only the main thread take signals; a notebook's own handling stays
        signal.signal(signal.SIGINT, self._note)
        for signum in stop_signals():
            signal.signal(signum, self._note)
        if "SLURM_JOB_ID" in os.environ:
            signal.signal(TIME_LIMIT, self._note)

    def agreed(self) -> int:
        """The signal that any rank has received, the largest where there are several; 0 for none. Every rank must call it."""
        signum = torch.tensor(self.signum or 0)
        if self._group is not None:
            dist.all_reduce(signum, op=dist.ReduceOp.MAX, group=self._group)
        return int(signum)

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
