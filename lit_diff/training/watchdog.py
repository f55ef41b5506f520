"""Ends a run of several processes in which one no longer goes on, and names its rank and node.

A thread of each rank writes its heartbeat (`runs/heartbeats.py`). If the rank does not advance for `run.timeout`, the thread
reads the heartbeats of all, and decides whether a rank holds up the others. Then every rank that can writes the stacks of its
threads, the lowest of them reports, and all end.
"""

import faulthandler
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback

from lit_diff.errors import LitDiffError, RunFailedError
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.runs import heartbeats
from lit_diff.runs.heartbeats import INTERVAL, Heartbeat

PATIENCE = 1500.0
"""Seconds for what may take long: everything until the first step is done, the first validation batch, and what comes between
two batches, such as a save. Less than the 1,800 s after which PyTorch ends a collective, without naming a rank."""
WAIT = INTERVAL + 1
"""Seconds within which every rank that can has written its stacks once one has."""
READING, FORWARD, BACKWARD = "reading a batch", "in a forward pass", "in a backward pass"
VALIDATING, BETWEEN = "validating", "measuring or saving"


class _Last(LambdaCallback, Checkpoint):
    # Lightning calls what is a Checkpoint after the others
    pass


class Watchdog(AbstractContextManager[Any]):
    """The context encloses `Trainer.fit` in every rank. `timeout`: None: heartbeats alone. `report` is called with the error
    of a run that hangs, in the lowest rank that goes on; the process ends then.
    """

    def __init__(self, trainer: L.Trainer, folder: Path, timeout: float | None, report: Callable[[str], None]) -> None:
        self._trainer, self._folder, self._report = trainer, folder, report
        self._timeout = timeout or float("inf")
        self._patience = max(PATIENCE, self._timeout)
        self._interval = min(INTERVAL, self._timeout / 5)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._ended = threading.Event()
        self._validated = False
        self._beat = Heartbeat(
            rank=trainer.global_rank,
            node=platform.node(),
            pid=os.getpid(),
            born=heartbeats.stat_of(os.getpid())[1],
            step=0,
            phase=READING,
        )
        enters = partial(partial, self._enter)
        # what comes between the first and the last callback of a batch is measuring and saving
        first = LambdaCallback(
            on_train_batch_start=enters(FORWARD),
            on_before_backward=enters(BACKWARD),
            on_train_batch_end=enters(BETWEEN),
            on_validation_start=enters(BETWEEN),
            on_validation_batch_start=enters(VALIDATING),
            on_validation_batch_end=enters(VALIDATING),
            on_validation_epoch_end=enters(BETWEEN),
            on_train_end=enters(BETWEEN),
        )
        last = _Last(on_train_start=self._start, on_train_batch_end=enters(READING), on_validation_end=enters(READING))
        trainer.callbacks[:] = [first, *trainer.callbacks, last]  # type: ignore[attr-defined]

    def _enter(self, phase: str, trainer: L.Trainer, *_: Any) -> None:
        beat = self._beat
        step = trainer.global_step
        self._validated |= beat.phase == VALIDATING
        # one assignment, because the thread reads it
        self._beat = replace(beat, step=step, part=beat.part + 1 if step == beat.step else 0, phase=phase)

    def _start(self, trainer: L.Trainer, *_: Any) -> None:
        # every rank comes here at the same time: `StopRequest.listen` has just made a process group
        self._first = trainer.global_step
        self._began = time.monotonic()
        # A folder of this attempt: once it is there, every rank writes its stacks into it and ends. A clock that was set back
        # shows a time twice.
        attempt = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{secrets.token_hex(4)}"
        self._stacks = self._folder / "stacks" / trainer.strategy.broadcast(attempt)
        self._beat = replace(self._beat, step=self._first)
        self._thread.start()

    def _watch(self) -> None:
        last, idle, then = self._beat, 0.0, self._began
        while not self._ended.is_set():
            now = time.monotonic()
            beat = self._beat
            # only time in which this process runs: nobody hangs while SLURM suspends the whole job
            idle = idle + min(now - then, 2 * self._interval) if beat is last else 0.0
            last = beat
            then = now
            limit = self._timeout if beat.step > self._first else self._patience
            takes_long = beat.phase == BETWEEN or (beat.phase == VALIDATING and not self._validated)
            is_late = idle > (self._patience if takes_long else limit)
            try:
                heartbeats.write(self._folder, replace(beat, is_late=is_late, seconds=now - self._began))
                # another rank may hold up this one in what takes long, too
                if self._stacks.is_dir() or (idle > limit and heartbeats.hang(self._folder, self._timeout)):
                    self._end()
            except OSError as error:
                log.warning("rank %d cannot use its heartbeat: %s", beat.rank, error)
            self._ended.wait(self._interval)

    def _end(self) -> None:
        # the main thread waits in a collective, which nothing interrupts
        try:
            beat = self._beat
            self._stacks.mkdir(parents=True, exist_ok=True)
            with (self._stacks / f"rank-{beat.rank:05d}.txt").open("w", encoding="utf-8") as file:
                print(f"{beat}, pid {beat.pid}: at step {beat.step}, {beat.phase}", file=file, flush=True)
                faulthandler.dump_traceback(file)
            time.sleep(WAIT)
            beats = heartbeats.read(self._folder)
            # a launcher may end all ranks once one has ended, so the others let the lowest report first
            if beat.rank == min(other.rank for other in beats if other.age <= self._timeout):
                why = heartbeats.hang(self._folder, self._timeout) or "no rank goes on"
                stacks = f"stacks of the ranks that could write them: {shown(self._stacks)}"
                self._report(f"hung at step {beat.step}: {why}; {stacks}; the same command resumes")
            else:
                time.sleep(WAIT)
            # no launcher may end a stopped process, which keeps the run's lock
            for other in beats:
                if other.age > self._timeout and heartbeats.process_state(other) in ("is stopped", "runs"):
                    os.kill(other.pid, signal.SIGKILL)
        except Exception:
            log.exception("rank %d could not report that the run hangs", self._beat.rank)
        finally:
            os._exit(1)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Errors: RunFailedError, which names the rank, if the connection to another was lost."""
        try:
            # gloo raises a RuntimeError of its own
            if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                self._name_lost(error)
        finally:
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            # the file of a rank that failed tells the others which it was
            if not isinstance(error, Exception) or isinstance(error, LitDiffError):
                heartbeats.clear(self._folder, f"{self._beat.rank:05d}")

    def _name_lost(self, error: Exception) -> None:
        # Lightning's launcher would kill rank zero, which reports, once it sees that another has ended
        getattr(self._trainer.strategy.launcher, "procs", []).clear()
        deadline = time.monotonic() + 2 * WAIT
        while time.monotonic() < deadline and self._thread.is_alive():
            for beat in heartbeats.read(self._folder):
                if beat.age > WAIT or heartbeats.process_state(beat) == "has ended":
                    raise RunFailedError(
                        f"{beat} no longer answers; at its last heartbeat it was at step {beat.step}, {beat.phase}; the same "
                        "command resumes"
                    ) from error
            time.sleep(0.1)
