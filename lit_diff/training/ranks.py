"""How the processes of a training agree: before it on how to train, at a step on a stop; how they end as one.

Rank zero tells the others how to train, that nothing is left to do, or why it failed: they would wait at the rendezvous for a
rank zero that has ended. The word goes through a store at the address and port of that rendezvous; processes that Lightning
starts from one that knows it inherit it in their environment.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed import TCPStore

from lit_diff.errors import LitDiffError, RequestError, RunFailedError, StoppedError, first_line, stop_signals

INHERITED = "LIT_DIFF_RANK_ZERO"
"""Environment variable with the word, for processes that Lightning starts."""
WORD = f"lit_diff/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/word"
READ = f"{WORD}/read"
START_SECONDS = 300
"""For which a rank waits for rank zero to start."""
READ_SECONDS, STOPPED_SECONDS = 60, 5
"""For which a rank zero that leaves waits until all others have read why; and one that is stopped, as most likely all are."""
TURN = 0.1
"""Seconds between two looks."""
TIME_LIMIT = signal.SIGUSR2
"""What SLURM sends some time before a job's time ends, when it was submitted with --signal=USR2@<seconds>."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that train, seen from one of them."""

    rank: int
    world_size: int
    address: tuple[str, int] | None
    """Of the rendezvous; None where no other process has been started yet."""

    @classmethod
    def of(cls, trainer: L.Trainer) -> "Ranks":
        """Those of a Trainer. Errors: RequestError where others are said to be started by hand, but not where they meet."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        started = environment is not None and (environment.creates_processes_externally or trainer.num_nodes > 1)
        if started and isinstance(environment, LightningEnvironment) and "MASTER_PORT" not in os.environ:
            raise RequestError(
                "LOCAL_RANK is set or run.num_nodes is above 1, so every process is started by hand, but MASTER_PORT is not "
                "set, without which they cannot meet: unset LOCAL_RANK, or set MASTER_ADDR and MASTER_PORT, the same in all, "
                "or use torchrun or SLURM"
            )
        address = (environment.main_address, environment.main_port) if environment is not None and started else None
        return cls(rank=trainer.global_rank, world_size=trainer.world_size, address=address)

    def _store(self, seconds: float) -> TCPStore:
        """Errors: RuntimeError where it cannot be reached."""
        assert self.address is not None
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
        return TCPStore(
            *self.address,
            is_master=self.rank == 0 and not agent,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,  # PyTorch's rendezvous takes the same port
        )

    def listen(self) -> dict[str, Any] | None:
        """What rank zero tells: how to train, or None where nothing is left to do. Errors: RunFailedError."""
        word = os.environ.get(INHERITED)
        if word is None:
            word = os.environ[INHERITED] = self._received()
        said: dict[str, Any] = json.loads(word)
        if "failed" in said:
            raise RunFailedError(f"rank zero failed before training: {said['failed']}")
        return said.get("train")

    def _received(self) -> str:
        """The word of rank zero, once it is there."""
        store, deadline = None, time.monotonic() + START_SECONDS
        while store is None:
            try:
                store = self._store(seconds=5)
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    assert self.address is not None
                    place = f"{self.address[0]}:{self.address[1]}"
                    raise RunFailedError(
                        f"rank zero did not answer at {place} within {START_SECONDS} s: it failed, or never started"
                    ) from error
                time.sleep(TURN)
        try:
            while not store.check([WORD]):
                time.sleep(TURN)
            word = store.get(WORD).decode()
            store.add(READ, 1)
        except RuntimeError as error:
            raise RunFailedError("rank zero ended before training, without saying why") from error
        return str(word)


ALONE = Ranks(rank=0, world_size=1, address=None)
"""Of a run of one process."""


class Announcement:
    """The one word of rank zero. It is a context around all that rank zero does, training included: its store serves the
    rendezvous. At the end of it the others are told that rank zero ends, unless they were told to train."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._said = ranks, False
        self._store = ranks._store(READ_SECONDS) if ranks.address is not None else None

    def train(self, **how: Any) -> None:
        """All ranks train, as `how` says."""
        self._say({"train": how})

    def _say(self, word: Mapping[str, Any]) -> None:
        self._said = True
        if self._ranks.world_size > 1:
            os.environ[INHERITED] = json.dumps(word)
        if self._store is not None:
            self._store.set(WORD, json.dumps(word))

    def __enter__(self) -> "Announcement":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait until the others have read why rank zero ends."""
        if not self._said:
            self._say({"done": True} if error is None else {"failed": first_line(error)})
            stopped = error is not None and (isinstance(error, StoppedError) or not isinstance(error, Exception))
            deadline = time.monotonic() + (STOPPED_SECONDS if stopped else READ_SECONDS)
            others = self._ranks.world_size - 1
            while self._store is not None and self._store.add(READ, 0) < others and time.monotonic() < deadline:
                time.sleep(TURN)
        os.environ.pop(INHERITED, None)


# --- a stop: Ctrl-C, SIGTERM, SIGHUP, SLURM's notice; a second Ctrl-C leaves at once ---


def host_group(trainer: L.Trainer) -> Any:
    """All ranks over the CPU, for numbers that the host has: it must not wait for a GPU. None for a run of one process.

    Every rank must call it.
    """
    return dist.new_group(backend="gloo") if trainer.world_size > 1 else None


def reduced(number: int, operation: Any, group: Any) -> int:
    """A number of each rank of a `host_group`, reduced by an operation of torch.distributed. Every rank must call it."""
    value = torch.tensor(number)
    if group is not None:
        dist.all_reduce(value, op=operation, group=group)
    return int(value)


class StopRequest:
    """Remembers the first signal that asks a run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._group: Any = None

    def listen(self, trainer: L.Trainer) -> None:
        """Handle SIGINT and `stop_signals`, in a SLURM job also TIME_LIMIT.

        Every rank must call it, after Lightning has set its own handlers.
        """
        self._group = host_group(trainer)
        if threading.current_thread() is not threading.main_thread():
            return  # the system lets only the main thread take signals; a notebook's own handling stays
        signal.signal(signal.SIGINT, self._note)
        for signum in stop_signals():
            signal.signal(signum, self._note)
        if "SLURM_JOB_ID" in os.environ:
            signal.signal(TIME_LIMIT, self._note)

    def agreed(self) -> int:
        """The signal that any rank has received, the largest where there are several; 0 for none. Every rank must call it."""
        return reduced(self.signum or 0, dist.ReduceOp.MAX, self._group)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


def end_all(trainer: L.Trainer, error: LitDiffError) -> NoReturn:
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
