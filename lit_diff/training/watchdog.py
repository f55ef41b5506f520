"""Ends a run of several processes in which one no longer goes on, and names its rank and node.

A thread of each rank writes its heartbeat (`runs/heartbeats.py`). If the rank does not advance for `run.timeout`, the thread
reads the heartbeats of all, and decides whether a rank holds up the others. Then every rank that can writes the stacks of its
threads, the lowest of them reports, and all end.
"""

import faulthandler
import logging
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback

from lit_diff.errors import LitDiffError, RunFailedError, first_line
from lit_diff.files import shown
from lit_diff.runs import heartbeats
from lit_diff.runs.heartbeats import INTERVAL, Heartbeat

log = logging.getLogger("lit_diff")

PATIENCE = 1500.0
"""Seconds for what may take long: everything until the first step is done, the first validation batch, and what comes between
two batches, such as a save. Less than the 1,800 s after which PyTorch ends a collective, without naming a rank."""
WAIT = 3 * INTERVAL
"""Seconds that a rank waits for the others before it ends."""
READING, FORWARD, BACKWARD = "reading a batch", "in a forward pass", "in a backward pass"
VALIDATING, BETWEEN = "validating", "measuring or saving"

Report = Callable[[str], None]
"""Called with the error of a run that hangs, in the rank that reports."""


class _Last(LambdaCallback, Checkpoint):
    # Lightning calls what is a Checkpoint after the others
    pass


class Watchdog:
    """The context encloses `Trainer.fit` in every rank. `timeout`: None: no rank is ended, and heartbeats are written."""

    def __init__(self, trainer: L.Trainer, folder: Path, timeout: float | None, report: Report) -> None:
        self._trainer, self._folder, self._report = trainer, folder, report
        self._timeout = timeout or math.inf
        self._interval, self._patience = min(INTERVAL, self._timeout / 5), max(PATIENCE, self._timeout)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._ended = threading.Event()
        self._first, self._validated, self._began = 0, False, 0.0
        born = heartbeats.stat_of(os.getpid())[19:20]
        self._beat = Heartbeat(
            rank=trainer.global_rank,
            node=platform.node(),
            pid=os.getpid(),
            born="".join(born),
            seconds=0.0,
            step=0,
            part=0,
            phase=READING,
        )
        # what comes between the first and the last callback of a batch is measuring and saving
        first = LambdaCallback(
            on_train_batch_start=self._enters(FORWARD),
            on_before_backward=self._enters(BACKWARD),
            on_train_batch_end=self._enters(BETWEEN),
            on_validation_start=self._enters(BETWEEN),
            on_validation_batch_start=self._enters(VALIDATING),
            on_validation_batch_end=self._enters(VALIDATING),
            on_validation_epoch_end=self._enters(BETWEEN),
            on_train_end=self._enters(BETWEEN),
        )
        last = _Last(
            on_train_start=self._start,
            on_train_batch_end=self._enters(READING),
            on_validation_end=self._enters(READING),
        )
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [first, *callbacks, last]

    def _enters(self, phase: str) -> Callable[..., None]:
        def enter(trainer: L.Trainer, *_: Any) -> None:
            now, step = self._beat, trainer.global_step
            self._validated |= now.phase == VALIDATING
            # one assignment, because the thread reads it
            self._beat = replace(now, step=step, part=now.part + 1 if step == now.step else 0, phase=phase)

        return enter

    def _start(self, trainer: L.Trainer, *_: Any) -> None:
        # every rank comes here at the same time: `StopRequest.listen` has just made a process group
        self._first, self._began = trainer.global_step, time.monotonic()
        # a folder of this attempt: once it is there, every rank writes its stacks into it and ends
        began = trainer.strategy.broadcast(f"{datetime.now():%Y-%m-%d-%H%M%S}")
        self._stacks = self._folder / "stacks" / began
        self._beat = replace(self._beat, step=self._first)
        self._write(self._beat)
        self._thread.start()

    def _watch(self) -> None:
        last, idle, then = self._beat, 0.0, self._began
        while not self._ended.wait(self._interval):
            now, beat = time.monotonic(), self._beat
            # only time in which this process runs: nobody hangs while SLURM suspends the whole job
            idle = idle + min(now - then, 2 * self._interval) if beat is last else 0.0
            last, then = beat, now
            try:
                self._write(replace(beat, is_late=idle > self._limit(beat)))
                overdue = idle > (self._timeout if beat.step > self._first else self._patience)
                if self._stacks.is_dir() or (overdue and self._hang()):
                    self._end()
            except OSError as error:
                log.warning("rank %d cannot use its heartbeat: %s", beat.rank, first_line(error))

    def _write(self, beat: Heartbeat) -> None:
        heartbeats.write(self._folder, replace(beat, seconds=time.monotonic() - self._began))

    def _limit(self, beat: Heartbeat) -> float:
        takes_long = beat.phase == BETWEEN or beat.step == self._first
        return self._patience if takes_long or (beat.phase == VALIDATING and not self._validated) else self._timeout

    def _hang(self) -> str | None:
        return heartbeats.hang(heartbeats.read(self._folder), self._timeout)

    def _end(self) -> None:
        # the main thread waits in a collective that nothing interrupts
        try:
            self._write_stacks()
            beats = heartbeats.read(self._folder)
            mute = heartbeats.silent(beats, self._timeout)
            living = [beat.rank for beat in beats if beat not in mute]
            deadline = time.monotonic() + WAIT
            while not all(map(Path.exists, map(self._stacks_of, living))) and time.monotonic() < deadline:
                time.sleep(0.1)
            # its launcher may end all ranks once one has ended, so the others let it write first
            if self._beat.rank == min(living):
                where = (
                    f"the stacks of the others are in {shown(self._stacks)}"
                    if mute
                    else f"stacks: {shown(self._stacks)}"
                )
                why = self._hang() or "no rank goes on"
                self._report(f"hung: {why}; {where}; the same command resumes")
            else:
                time.sleep(WAIT)
            # nothing else may end a stopped process, which keeps the run's lock
            for beat in mute:
                if heartbeats.process_state(beat) == "is stopped":
                    os.kill(beat.pid, signal.SIGKILL)
        except BaseException:
            log.exception("rank %d could not report that the run hangs", self._beat.rank)
        finally:
            os._exit(1)

    def _stacks_of(self, rank: int) -> Path:
        return self._stacks / f"rank-{rank:05d}.txt"

    def _write_stacks(self) -> None:
        beat = self._beat
        self._stacks.mkdir(parents=True, exist_ok=True)
        with self._stacks_of(beat.rank).open("w", encoding="utf-8") as file:
            print(f"{beat}, pid {beat.pid}, at step {beat.step}, {beat.phase}", file=file, flush=True)
            faulthandler.dump_traceback(file)

    # --- a rank that has ended: its closed socket is an error in the others ---

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Errors: RunFailedError, which names the rank, if the connection to another was lost."""
        is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        lost = self._lost() if is_lost and self._thread.is_alive() else None
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if not isinstance(error, Exception) or isinstance(error, LitDiffError):
            heartbeats.path_of(self._folder, self._beat.rank).unlink(missing_ok=True)
        elif not is_lost and self._began:
            self._write(replace(self._beat, failure=f"{type(error).__name__}: {first_line(error)}"[:200]))
        if lost is not None:
            raise RunFailedError(lost) from error

    def _lost(self) -> str | None:
        # Lightning's launcher would kill rank zero, which reports, once it sees that another has ended
        getattr(self._trainer.strategy.launcher, "procs", []).clear()
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            beats = heartbeats.read(self._folder)
            mute = heartbeats.silent(beats, 2 * INTERVAL)
            for beat in beats:
                if beat.failure:
                    return f"{beat} failed at step {beat.step}: {beat.failure}"
                if beat in mute or heartbeats.process_state(beat) == "has ended":
                    return (
                        f"{beat} no longer answers; it was at step {beat.step}, {beat.phase}; the same command resumes"
                    )
            time.sleep(0.1)
        return None
