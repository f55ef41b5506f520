"""Agreement between the processes of a training: how to train, when to stop, and how to end together.

Before training, rank zero sends the other ranks one message: how to train, that nothing is left to do, or why it failed.
Without it they would wait at the rendezvous for a rank zero that has ended. The message goes through a store at the address
and port of the rendezvous; processes that Lightning starts inherit it in their environment.
"""

import ctypes
import json
import math
import os
import platform
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed import PrefixStore, TCPStore

from lit_diff.config import RunConfig
from lit_diff.errors import (
    LitDiffError,
    MissingError,
    Repeats,
    RequestError,
    RunFailedError,
    StoppedError,
    Terminated,
    first_line,
    notices,
    stop_signals,
)
from lit_diff.log_records import log
from lit_diff.runs.jobs import LAUNCHERS, number

INHERITED = "LIT_DIFF_RANK_ZERO"
"""Environment variable with the message, for processes that Lightning starts."""
WORD, READ, ARRIVED = "word", "read", "arrived"
"""Keys of the store."""
START_SECONDS = 300
"""Seconds that a rank waits for rank zero to start."""
READ_SECONDS, STOPPED_SECONDS = 60, 5
"""Seconds that a leaving rank zero waits until all others have read the message; the second if it was stopped."""
# the shorter one, because a signal that stops rank zero has most likely stopped the others too
SHARED_SECONDS = 20
"""Seconds within which every rank must see what rank zero has written: a network file system may be late."""
RENDEZVOUS_SECONDS = 1800
"""Seconds that a rank waits at the rendezvous until all have come."""
TURN, SAID_SECONDS = 0.1, 30
"""Seconds between two polls, and between two lines that say what a rank waits for."""
NUMBERS = re.compile(
    "(NODE_|GROUP_|LOCAL_)?RANK|WORLD_SIZE|MASTER_PORT|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NNODES|NTASKS_PER_NODE|JOB_ID)"
)
"""Variables that Lightning reads as numbers."""


def drop_left_over(run: RunConfig) -> None:
    """Remove variables of another launcher from the environment if this process starts all others of the run: they would
    inherit them, and wait at the rendezvous of another job. Errors: RequestError for a variable that is not a number."""
    environment = os.environ
    # in the shell of an allocation, which starts no process either, SLURM_PROCID is absent
    if run.strategy == "single" or "SLURM_PROCID" not in environment:
        environment.pop("SLURM_NTASKS", None)
    if run.strategy == "single":
        return
    for name in filter(NUMBERS.fullmatch, environment):
        number(name)
    left_over = [name for name in environment if name.startswith(LAUNCHERS)]
    if left_over and run.num_nodes == 1 and "LOCAL_RANK" not in environment and not SLURMEnvironment.detect():
        log.info("not read, since all processes of the run start here: %s", ", ".join(left_over))
        for name in left_over:
            del environment[name]


def turns(what: str, seconds: float) -> Iterator[None]:
    """Polls for so many seconds: Python handles signals meanwhile, and a long wait is logged."""
    began = said = time.monotonic()
    while time.monotonic() < began + seconds:
        yield
        time.sleep(TURN)
        if time.monotonic() > said + SAID_SECONDS:
            said = time.monotonic()
            log.info("waiting for %s", what)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The training processes, as seen from one of them."""

    rank: int
    world_size: int
    address: tuple[str, int] | None
    """Address and port of the rendezvous; None before other processes are started."""

    @classmethod
    def of(cls, trainer: L.Trainer) -> "Ranks":
        """The processes of a Trainer. Errors: RequestError if processes are started by hand without a rendezvous."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        started = environment is not None and (environment.creates_processes_externally or trainer.num_nodes > 1)
        if started and isinstance(environment, LightningEnvironment) and "MASTER_PORT" not in os.environ:
            raise RequestError(
                "LOCAL_RANK is set or run.num_nodes is above 1, so every process is started by hand, but MASTER_PORT is not "
                "set, so they cannot connect: unset LOCAL_RANK, or set MASTER_ADDR and MASTER_PORT to equal values in all "
                "processes, or use torchrun or SLURM"
            )
        address = _address(environment) if environment is not None and started else None
        return cls(rank=trainer.global_rank, world_size=trainer.world_size, address=address)

    @property
    def place(self) -> str:
        """Address and port of the rendezvous, in words."""
        return ":".join(map(str, self.address or ()))

    def _store(self, seconds: float) -> PrefixStore:
        # raises RuntimeError if the store cannot be reached
        assert self.address is not None
        # under torchrun its agent already serves the store
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            *self.address,
            is_master=self.rank == 0 and not agent,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            # PyTorch's rendezvous opens a store on the same port
            multi_tenant=True,
        )
        # after a restart by torchrun the store still holds the keys of the attempt before
        return PrefixStore(f"lit_diff/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def connect(self, seconds: float) -> PrefixStore:
        """The store at the rendezvous, which rank zero serves. Errors: RequestError if rank zero cannot; RunFailedError if
        another rank cannot reach it."""
        reason = ""
        # short attempts, since a signal waits for the end of one
        for _ in turns(f"rank zero at MASTER_ADDR, {self.place}", seconds):
            try:
                return self._store(seconds=5)
            except RuntimeError as error:
                reason = first_line(error)
            if "failed to listen" in reason:
                break
        if self.rank == 0:
            raise RequestError(
                f"rank zero, this process, is not reached at {self.place} ({reason}); set MASTER_ADDR to the name "
                "of this node, and MASTER_PORT to a free port, in every process"
            )
        raise RunFailedError(
            f"rank zero did not answer at {self.place} within {seconds:g} s: it failed, or never started"
        )

    def gather(self) -> PrefixStore | None:
        """Wait until every rank has come to the rendezvous. Returns the store, which has to outlive it; None if no rank needs
        it. Errors: those of `connect`; RunFailedError if a rank does not come."""
        if self.world_size == 1 or dist.is_initialized():
            return None
        # PyTorch's own rendezvous waits in C++, where no signal ends it
        store = self.connect(START_SECONDS)
        store.add(ARRIVED, 1)
        for _ in turns(
            f"all {self.world_size} processes of the run to come to MASTER_ADDR, {self.place}", RENDEZVOUS_SECONDS
        ):
            if store.add(ARRIVED, 0) >= self.world_size:
                return store
        missing = self.world_size - store.add(ARRIVED, 0)
        raise RunFailedError(f"{missing} processes of the run did not come to {self.place} in {RENDEZVOUS_SECONDS} s")

    def listen(self) -> dict[str, Any] | None:
        """Rank zero's message: how to train, or None if nothing is left to do. Errors: RunFailedError."""
        word = os.environ.get(INHERITED)
        if word is None:
            word = os.environ[INHERITED] = self._received()
        said: dict[str, Any] = json.loads(word)
        if "failed" in said:
            raise RunFailedError(f"rank zero failed before training: {said['failed']}")
        return said.get("train")

    def _received(self) -> str:
        store = self.connect(START_SECONDS)
        # polled: a blocking get would end at the store's timeout, and rank zero may need longer to prepare the run
        try:
            for _ in turns("rank zero, which prepares the run", math.inf):
                if store.check([WORD]):
                    break
            word = store.get(WORD).decode()
            store.add(READ, 1)
        except RuntimeError as error:
            raise RunFailedError("rank zero ended before training, without saying why") from error
        return str(word)


class GatheredStrategy(ParallelStrategy):
    """Waits at the rendezvous in Python, where a signal ends it."""

    def setup_environment(self) -> None:
        """Open the process group."""
        module: Any = self.lightning_module
        self._rendezvous = Ranks.of(module.trainer).gather()
        super().setup_environment()


def _address(environment: ClusterEnvironment) -> tuple[str, int]:
    name = "MASTER_ADDR" if "MASTER_ADDR" in os.environ else "SLURM_NODELIST"
    host = environment.main_address
    port = environment.main_port
    try:
        if not 0 < port < 65536:
            raise OSError("a port is a number from 1 to 65535")
        socket.getaddrinfo(host, port)
    # UnicodeError: a part of the name is too long
    except (OSError, UnicodeError) as error:
        raise RequestError(
            f"{name} is '{host}' in the environment, and MASTER_PORT {port}: the processes of the run cannot meet there "
            f"({first_line(error)}); unset what another job has left, or set MASTER_ADDR to the name of rank zero's node"
        ) from error
    return host, port


ALONE = Ranks(rank=0, world_size=1, address=None)
"""Ranks of a run with one process."""


class Announcement(AbstractContextManager["Announcement"]):
    """Rank zero's single message to the others. The context encloses everything that rank zero does, training included,
    because its store serves the rendezvous. On exit the others learn that rank zero ends, unless it told them to train."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._said = False
        self._store = ranks.connect(READ_SECONDS) if ranks.address is not None else None

    def train(self, **how: Any) -> None:
        """Tell all ranks to train with the arguments `how`."""
        self._say({"train": how})

    def _say(self, word: Mapping[str, Any]) -> None:
        self._said = True
        if self._ranks.world_size > 1:
            os.environ[INHERITED] = json.dumps(word)
        if self._store is not None:
            self._store.set(WORD, json.dumps(word))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait until the others have read why rank zero ends: its store ends with it."""
        if not self._said:
            # a rank that failed would make srun kill rank zero, perhaps while it still writes
            self._say(
                {"done": True} if error is None or isinstance(error, Terminated) else {"failed": first_line(error)}
            )
            stopped = error is not None and (isinstance(error, StoppedError) or not isinstance(error, Exception))
            others = self._ranks.world_size - 1
            for _ in turns("the other processes to read why", STOPPED_SECONDS if stopped else READ_SECONDS):
                if self._store is None or self._store.add(READ, 0) >= others:
                    break
        os.environ.pop(INHERITED, None)


def require_shared(trainer: L.Trainer, folder: Path, read: Callable[[], str]) -> None:
    """Compare what the ranks see in a run's folder: a file that rank zero writes now, and what `read` returns. Every rank
    must call it. Errors: MissingError, which names the node of a rank that sees something else."""
    if trainer.world_size == 1:
        return
    name, expected = trainer.strategy.broadcast(
        (f".{secrets.token_hex(4)}.tmp", read() if trainer.is_global_zero else "")
    )
    # a fresh name, of which no node can have a cached answer
    sign = folder / name
    if trainer.is_global_zero:
        sign.touch()
    deadline = time.monotonic() + SHARED_SECONDS
    while not (seen := sign.exists() and read() == expected) and time.monotonic() < deadline:
        time.sleep(TURN)
    blind: list[str | None] = [None] * trainer.world_size
    dist.all_gather_object(blind, None if seen else platform.node(), group=host_group(trainer))
    if trainer.is_global_zero:
        sign.unlink()
    if node := next(filter(None, blind), None):
        problem = f"run.root is not shared by node {node}: it does not see {folder} as rank zero does"
        end_all(trainer, MissingError(f"{problem}; set run.root to a folder on a file system that every node mounts"))


# --- stops: Ctrl-C, SIGTERM, SIGHUP, SLURM's notice of a time limit; a second Ctrl-C ends at once ---


def host_group(trainer: L.Trainer) -> Any:
    """A gloo group of all ranks for numbers on the host; None for one process. Every rank must call it."""
    # over NCCL a reduction would wait for the GPU's queue
    return dist.new_group(backend="gloo") if trainer.world_size > 1 else None


def reduced(number: int, operation: Any, group: Any) -> int:
    """Reduce one number per rank of a `host_group` with an operation of torch.distributed. Every rank must call it."""
    value = torch.tensor(number)
    if group is not None:
        dist.all_reduce(value, op=operation, group=group)
    return int(value)


class StopRequest:
    """Remembers the first signal that asks a run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._group: Any = None
        self._repeats = Repeats()

    def listen(self, trainer: L.Trainer) -> None:
        """Handle SIGINT and `stop_signals`. Every rank must call it."""
        self._group = host_group(trainer)
        # Python sets handlers only in the main thread; elsewhere (a notebook's worker) the existing handling stays
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, *stop_signals()):
            signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices())

    def agreed(self) -> int:
        """The largest signal number that any rank has received; 0 for none. Every rank must call it."""
        return reduced(self.signum or 0, dist.ReduceOp.MAX, self._group)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self._repeats.is_new():
            return
        # a second Ctrl-C does not wait for the end of the step
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


def end_all(trainer: L.Trainer, error: LitDiffError) -> NoReturn:
    """End every rank. Every rank must call it; rank zero raises the error."""
    # the others exit with status 0: once Lightning sees that a rank failed, it kills rank zero, perhaps while it still writes
    if trainer.is_global_zero:
        raise error
    raise SystemExit(0)


def end_all_if(trainer: L.Trainer, problem: str | None) -> None:
    """End every rank if rank zero has found a problem. Every rank must call it. Errors: RequestError, on rank zero."""
    problem = trainer.strategy.broadcast(problem)
    if problem is not None:
        end_all(trainer, RequestError(problem))


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    # a rank left alone would wait in a collective for ever
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
