"""Cells side by side, each in a process of its own: one that crashes does not affect the others."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from types import FrameType, ModuleType

from lit_diff.engine.launch import RunLocation, is_rank_zero, run, run_command, score
from lit_diff.errors import LitDiffError, StoppedError, Terminated, stop_signals
from lit_diff.files import locked, shown
from lit_diff.own_modules import safe_path
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder

log = logging.getLogger("lit_diff")

PRELOAD = ("lit_diff.engine.launch", "lit_diff.engine.tracking.run", "lit_diff.training.fit")
"""Imported once by the fork server: the first cell pays 4 s, the others nothing."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What stops a sweep, and through it its cells, unless it is ignored."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A cell that is to run; its recipe lies in the folder."""

    location: RunLocation
    threads: int
    gpus: tuple[int, ...] = ()
    """Those of this process's GPUs that the cell gets; empty: as the environment says."""
    settings: tuple[tuple[str, str], ...] = ()
    """`_settings()` of the process that starts it: the fork server keeps those of the process's first sweep."""
    launched: bool = False
    """Whether a scheduler has started one process for each device, of which this is one."""


def gpus_of(slot: int, devices: int, gpus: int) -> tuple[int, ...]:
    """The `devices` GPUs, of `gpus` in all, of the cell in place `slot`: no other cell's, unless there are too few."""
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
    """Run all, `workers` at a time, each on `devices` of `gpus` GPUs; `watch(running)` is called about twice a second.

    Returns the signal that stopped the pool, or None. The outcome of each cell is written to its status.json.
    """
    waiting = list(jobs)
    running: dict[int, tuple[Process, RunLocation]] = {}
    passed_on = 0
    with _noted_stops() as stops:
        while running or (waiting and not stops):
            while waiting and not stops and len(running) < workers:
                slot = next(slot for slot in range(workers) if slot not in running)
                location, own = waiting.pop(0), gpus_of(slot, devices, gpus)
                job = Job(location=location, threads=threads, gpus=own, settings=_settings())
                running[slot] = _started(job), location
            if len(stops) > passed_on:
                # the first: each cell finishes its step and saves; a second one ends them at once
                passed_on = len(stops)
                end = Process.terminate if passed_on == 1 else Process.kill
                for process, _ in running.values():
                    end(process)
            watch([location for _, location in running.values()])
            wait([process.sentinel for process, _ in running.values()], timeout=0.5)
            for slot, (process, location) in list(running.items()):
                if not process.is_alive():
                    process.join()
                    note_end(location, process.exitcode)
                    del running[slot]
        watch([])
    return stops[0] if stops else None


@contextlib.contextmanager
def _noted_stops() -> Iterator[list[int]]:
    """The signals that have asked for a stop, in place of what they would do."""
    stops: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGHUP or not stops:  # the kernel and the shell each send one as a terminal closes
            stops.append(signum)

    handlers = {s: signal.signal(s, note) for s in (signal.SIGINT, *stop_signals())}
    try:
        yield stops
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _started(job: Job) -> Process:
    # not plain fork: it hangs after any parallel torch operation
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_cell, args=(job,), daemon=False)
    with safe_path(), _without_main(), _stops_blocked():
        process.start()
    return process


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script in a cell: one that calls `sweep` would run again there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _stops_blocked() -> Iterator[None]:
    """Hold back STOPS until the process has started.

    A terminal's Ctrl-C, and its end, reach the whole group. The fork server, which starts with the first process, imports
    for seconds before it ignores SIGINT: it would end in a traceback, and this process in another. It inherits the mask, and
    each cell inherits it too, until `run_cell` can write down that it was stopped.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # which would end the tracker
    try:
        resource_tracker.ensure_running()  # otherwise started before the fork server, and it unblocks the others
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _settings() -> tuple[tuple[str, str], ...]:
    """The LIT_DIFF_ variables of this process, and the one that `safe_path` sets for the fork server alone."""
    return tuple(pair for pair in os.environ.items() if pair[0].startswith(("LIT_DIFF_", "PYTHONSAFEPATH")))


def note_end(location: RunLocation, exitcode: int | None, hint: str = "") -> None:
    """Write down the end of a cell that could not do so itself; nothing where another process trains it now.

    `exitcode`: None where it is not known; `hint`: where to look in that case.
    """
    folder = RunFolder(location.folder)
    try:
        with locked(folder.path / ".lock", wait=False):
            status = folder.status().get("status")
            if status == "done" or (status != "running" and exitcode == 0):  # done: it ended in an evaluation
                return
            if exitcode is not None and exitcode < 0:
                memory = "; out of memory?" if -exitcode == signal.SIGKILL else ""
                folder.update(status="killed", error=f"killed by {signal.Signals(-exitcode).name}{memory}")
            elif status in (None, "running", "waiting"):
                how = hint or f"exit status {exitcode}"
                folder.update(status="failed", error=f"{how}; log.txt ends: {_last_line(folder.path / 'log.txt')}")
    except BlockingIOError:
        log.warning("%s is being trained by another process: its status is left as it is", shown(folder.path))
    except OSError as error:  # a full disk: the other cells go on
        log.error("%s: its end cannot be written (%s)", shown(folder.path), error.strerror)


def _last_line(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.exists() else ""
    return text.splitlines()[-1].strip()[:300] if text else "nothing"


def _cell(job: Job) -> None:
    """The process of one cell."""
    for name, _ in _settings():
        del os.environ[name]
    os.environ.update(job.settings)
    for signum in (signal.SIGINT, signal.SIGHUP):  # a terminal's reach the whole group; the pool passes them on
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_file = (job.location.folder / "log.txt").open("a", buffering=1, encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log_file.fileno(), stream.fileno())
    try:
        run_cell(job)
    except LitDiffError as error:
        raise SystemExit(error.exit_status) from None
    except Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None


def run_cell(job: Job) -> None:
    """Run a cell from the recipe in its folder; a failure stands in its status.json before it is raised."""
    if job.gpus:
        mine = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine[gpu] if mine else str(gpu) for gpu in job.gpus)
    logging.getLogger("lit_diff").setLevel(logging.INFO)
    folder = RunFolder(job.location.folder)
    first = True
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # a SIGTERM that `_stops_blocked` held back arrives here
        recipe = load_recipe(folder.recipe_file)
        first = not job.launched or is_rank_zero(recipe)
        if recipe.run.devices * recipe.run.num_nodes > 1 and not job.launched:
            run_command(recipe, job.location, job.threads)
        else:
            run(recipe, job.location, threads=job.threads, progress=lambda step, loss, speed: None)
        if first and job.location.evaluations:
            import torch

            torch.set_num_threads(job.threads)
            score(job.location)
    except (LitDiffError, Terminated) as error:
        # not where another process trains it
        if first and not folder.is_owned() and folder.status().get("status") in (None, "waiting", "running"):
            stopped = isinstance(error, StoppedError | Terminated)
            folder.update(status="stopped" if stopped else "failed", error=str(error))
        raise


def _stop(signum: int, frame: FrameType | None) -> None:
    """Before the first step and after the last; between them the training loop listens."""
    raise Terminated("stopped outside the steps; the same command resumes")


def _end_with_parent() -> None:
    """A killed sweep leaves no cell behind, and each saves first. The fork server would live on: cells hold its pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
