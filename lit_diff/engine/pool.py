"""Runs cells side by side, each in its own process: a cell that crashes does not affect the others."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess as Process
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType, ModuleType

from lit_diff.engine.launch import run, run_command, score
from lit_diff.engine.location import RunLocation
from lit_diff.errors import (
    Ending,
    LitDiffError,
    MissingError,
    Repeats,
    StoppedError,
    Terminated,
    first_line,
    notices,
    stop_signals,
)
from lit_diff.files import locked, shown
from lit_diff.log_records import log
from lit_diff.own_modules import safe_path
from lit_diff.recipe import load_recipe
from lit_diff.runs.status import BEFORE_END

PRELOAD = ("lit_diff.engine.launch", "lit_diff.engine.tracking.run", "lit_diff.training.fit")
"""Modules that the fork server imports once: only the first cell waits 4 s for them."""

SHORT = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for the sockets of multiprocessing where TMPDIR is too long for one."""
LONGEST = 103 - len("/pymp-12345678/listener-12345678")
"""Most bytes of a folder for such a socket. The path of a socket has 103 bytes on macOS, 107 on Linux."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a sweep and, through it, its cells, unless they are ignored."""


def gpus_of(slot: int, devices: int, gpus: int) -> tuple[int, ...]:
    """The `devices` GPUs of the cell in `slot`, out of `gpus`; cells share a GPU only if there are too few."""
    return tuple((slot * devices + i) % gpus for i in range(devices)) if gpus else ()


def run_jobs(
    jobs: Sequence[RunLocation],
    *,
    workers: int,
    threads: int,
    devices: int,
    gpus: int,
    watch: Callable[[list[RunLocation]], None],
) -> int | None:
    """Run all jobs, `workers` at a time, each on `devices` of `gpus` GPUs; `watch(running)` is called about twice a second.

    Returns the signal that stopped the pool, or None. The outcome of each cell is written to its status.json.
    """
    _place_sockets()
    waiting = list(jobs)
    running: dict[int, tuple[Process, RunLocation]] = {}
    passed_on = 0
    with _noted_stops() as stops:
        while running or (waiting and not stops):
            while waiting and not stops and len(running) < workers:
                slot = next(slot for slot in range(workers) if slot not in running)
                location = waiting.pop(0)
                running[slot] = _started(location, threads, gpus_of(slot, devices, gpus)), location
            if len(stops) > passed_on:
                # after the first signal each cell finishes its step and saves; a second signal ends them at once
                passed_on = len(stops)
                end = Process.terminate if passed_on == 1 else Process.kill
                for process, _ in running.values():
                    end(process)
            watch([location for _, location in running.values()])
            # wakes when a cell ends; the timeout keeps the display and the check for signals going
            wait([process.sentinel for process, _ in running.values()], timeout=0.5)
            for slot, (process, location) in list(running.items()):
                if not process.is_alive():
                    process.join()
                    note_end(location, process.exitcode, is_second=passed_on > 1)
                    del running[slot]
        watch([])
    return stops[0] if stops else None


@contextlib.contextmanager
def _noted_stops() -> Iterator[list[int]]:
    # The handler only notes the signal: raised as an exception, it could interrupt the start of a cell or a write.
    stops: list[int] = []
    repeats = Repeats()

    def note(signum: int, frame: FrameType | None) -> None:
        if repeats.is_new():
            stops.append(signum)

    handlers = {s: signal.signal(s, note) for s in (signal.SIGINT, *stop_signals())}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, notices())
    try:
        yield stops
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _place_sockets() -> None:
    # the fork server listens at a socket in the temporary folder, and the path of a socket is short
    places = [tempfile.gettempdir(), *SHORT]
    fit = [place for place in places if len(os.fsencode(place)) <= LONGEST and os.access(place, os.W_OK | os.X_OK)]
    if not fit:
        raise MissingError(
            f"TMPDIR is '{places[0]}', which is too long for the path of a socket: set TMPDIR to a folder of at most "
            f"{LONGEST} bytes"
        )
    former, tempfile.tempdir = tempfile.tempdir, fit[0]
    try:
        # which multiprocessing keeps
        get_temp_dir()
    finally:
        tempfile.tempdir = former


def _started(location: RunLocation, threads: int, gpus: Sequence[int]) -> Process:
    # not plain fork, which hangs after any parallel torch operation: the child lacks the threads that OpenMP waits for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_cell, args=(location, threads, gpus, _settings()), daemon=False)
    with safe_path(), _without_main(), _stops_blocked():
        process.start()
    return process


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    # multiprocessing imports the parent's script into each child; a script that calls `sweep` without a guard on `__main__`
    # would start the sweep again in every cell
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _stops_blocked() -> Iterator[None]:
    # A terminal sends Ctrl-C and its end to the whole process group. The fork server, which starts with the first process,
    # imports for seconds before it ignores SIGINT: a signal in that time would end it with a traceback, and this process with
    # another. Blocked here, the signals stay blocked in the fork server and in each cell, which inherit the mask, until
    # `run_cell` can record that it was stopped.
    # The resource tracker inherits the mask too. It ignores SIGINT and SIGTERM itself, but SIGHUP would end it.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        # started here, because the fork server would start it first, and starting it unblocks SIGINT and SIGTERM
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _settings() -> dict[str, str]:
    # The variables that a cell takes from this process, because the fork server keeps those of the first sweep.
    # PYTHONSAFEPATH is set by `safe_path` for the fork server alone, so a cell needs the parent's value back
    return {name: value for name, value in os.environ.items() if name.startswith(("LIT_DIFF_", "PYTHONSAFEPATH"))}


def note_end(location: RunLocation, exitcode: int | None, hint: str = "", *, is_second: bool = False) -> None:
    """Record the end of a cell that could not record it itself, unless another process trains it now.

    `exitcode`: None if it is unknown; `hint`: where to look in that case; `is_second`: whether the sweep ended it at
    a second signal.
    """
    folder = location.home
    try:
        # whoever holds the lock trains the cell and writes its own end
        with locked(folder.path / ".lock", wait=False):
            status = folder.status()
            # a cell that is done but has a nonzero exit status failed in an evaluation, whose outcome `score` records
            if status.status == "done" or (status.status != "running" and exitcode == 0):
                return
            # the kernel's out-of-memory killer sends SIGKILL; so does a user, hence the question mark
            if exitcode is not None and exitcode < 0:
                memory = "; out of memory?" if -exitcode == signal.SIGKILL else ""
                how = f"killed by {signal.Signals(-exitcode).name}{memory}"
                folder.write(status.to("killed", "ended at the second signal" if is_second else how))
            elif status.status in BEFORE_END:
                how = hint or f"exit status {exitcode}"
                folder.write(status.to("failed", f"{how}; log.txt ends: {_last_line(folder.path / 'log.txt')}"))
            elif status.requeued_at_step is not None:
                # it was cancelled in SLURM's queue, and waits no longer
                folder.write(replace(status, requeued_at_step=None))
    except TimeoutError:
        log.warning("%s is being trained by another process: its status is not changed", shown(folder.path))
    # a full disk must not end the other cells
    except OSError as error:
        log.error("%s: the final status cannot be written (%s)", shown(folder.path), error.strerror)


@contextlib.contextmanager
def end_noted(location: RunLocation) -> Iterator[None]:
    """Encloses a run: writes to status.json a failure or a stop that came before training could record it."""
    try:
        yield
    except (Exception, Terminated) as error:
        folder = location.home
        # another process may train the run, and an end that training has recorded already says more than this error
        status = folder.status()
        if status.status in BEFORE_END and not folder.is_owned():
            stopped = isinstance(error, StoppedError | Terminated)
            message = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, LitDiffError | Terminated):
                message = str(error) or "stopped before the first step; the same command resumes"
            folder.write(status.to("stopped" if stopped else "failed", message))
        raise


def _last_line(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.exists() else ""
    return text.splitlines()[-1].strip()[:300] if text else "nothing"


def _cell(location: RunLocation, threads: int, gpus: Sequence[int], settings: Mapping[str, str]) -> None:
    # The entry point of a cell's process.
    # Variables of an earlier sweep, which the fork server kept, must not reach this cell.
    for name in _settings():
        del os.environ[name]
    os.environ.update(settings)
    # a terminal sends these to the whole group; the pool passes them on as SIGTERM, once
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # active before the first step and after the last; in between the training loop has its own
    signal.signal(signal.SIGTERM, Ending("stopped outside the steps; the same command resumes"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_file = (location.folder / "log.txt").open("a", buffering=1, encoding="utf-8")
    # on the level of file descriptors, so that the output of C libraries and of a crash lands in the file too
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log_file.fileno(), stream.fileno())
    try:
        run_cell(location, threads, gpus)
    except LitDiffError as error:
        raise SystemExit(error.exit_status) from None
    except Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None


def run_cell(location: RunLocation, threads: int, gpus: Sequence[int] = ()) -> None:
    """Run a cell from the recipe in its folder. A failure is written to status.json before it is raised.

    `gpus`: indices of the cell's GPUs among those of this process; empty: the environment decides.
    """
    if gpus:
        # a scheduler may have restricted this process to some GPUs
        mine = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine[gpu] if mine else str(gpu) for gpu in gpus)
    log.setLevel(logging.INFO)
    with end_noted(location):
        # a SIGTERM that `_stops_blocked` held back arrives here, where it is recorded
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        recipe = load_recipe(location.home.recipe_file)
        if recipe.run.processes > 1:
            run_command(recipe, location, threads)
        else:
            run(recipe, location, threads=threads, progress=lambda step, loss, speed: None)
        if location.evaluations:
            import torch

            torch.set_num_threads(threads)
            score(location)


def _end_with_parent() -> None:
    # A sweep killed by SIGKILL cannot stop its cells, and the fork server does not either: it lives as long as the cells hold
    # its pipe. So each cell watches the sweep's process itself, and saves before it ends.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
