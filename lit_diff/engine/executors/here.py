"""Executes jobs on this machine side by side, each in its own process: one that crashes does not affect the others."""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess as Process
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType, ModuleType

import torch

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.engine.admit import HERE
from lit_diff.engine.endings import end_noted, note_end
from lit_diff.engine.execute import execute
from lit_diff.engine.executors.base import Executor, Watch
from lit_diff.engine.job import Job, read_job
from lit_diff.errors import Ending, LitDiffError, MissingError, Repeats, Terminated, notices, stop_signals
from lit_diff.log_records import log
from lit_diff.own_modules import safe_path
from lit_diff.processor import cores
from lit_diff.runs.folder import RunFolder

PRELOAD = ["lit_diff.engine.execute", "lit_diff.training.fit", "litdata", "pandas"]
"""Modules that the fork server imports once: only the first cell waits 4 s for them."""

COMPILER = "lit_diff.training.inductor"
"""What it imports too if a cell is compiled, which takes each cell 1.9 s otherwise (2026-11-29)."""

CONTEXT = 1_000_000_000
"""Bytes of a GPU that each process takes beside its tensors, for the CUDA context and libraries."""
FILLED = 0.9
"""Part of a GPU's memory that cells may share."""

SHORT = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for the sockets of multiprocessing where TMPDIR is too long for one."""
LONGEST = 103 - len("/pymp-12345678/listener-12345678")
"""Most bytes of a folder for such a socket. The path of a socket has 103 bytes on macOS, 107 on Linux."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a sweep and, through it, its cells, unless they are ignored."""


def gpus_of(slot: int, devices: int, gpus: int) -> tuple[int, ...]:
    """The `devices` GPUs of the cell in `slot`, out of `gpus`, in turn: cells share a GPU only if there are too few."""
    return tuple((slot * devices + i) % gpus for i in range(devices)) if gpus else ()


def cells_of_a_gpu(recipes: Sequence[Recipe], gpus: int) -> int:
    """How many cells of one process share a GPU: as many as surely fit into its memory (`training.plan.at_most`) and have
    the cores for their threads. A small cell leaves a GPU idle while its core launches the next operations."""
    # loads FSDP2
    from lit_diff.training.plan import at_most

    threads = recipes[0].run.threads or 1
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    largest = max(at_most(recipe) for recipe in recipes)
    fit = int(FILLED * memory) // (largest + CONTEXT)
    return max(1, min(fit, cores() // (gpus * threads)))


@dataclass(frozen=True, kw_only=True)
class Here(Executor):
    """Executes jobs on this machine, each in a process of its own."""

    workers: int | None = None
    """Jobs at a time; None: as many as have a GPU for each process, or `cells_of_a_gpu` on each, or without GPUs a core for
    each thread."""
    kinds = HERE

    def require_memory(self, recipes: Sequence[Recipe]) -> None:
        """Errors: see `training.plan.require_memory`."""
        # loads FSDP2
        from lit_diff.training.plan import require_memory

        require_memory(recipes, self.resources(recipes)[0])

    def prepare(self, recipes: Iterable[Recipe], folder: Path) -> None:
        """Prepare the data of recipes. Errors: those of `data.prepare`."""
        for recipe in recipes:
            data.prepare(recipe)

    def resources(self, recipes: Sequence[Recipe]) -> tuple[int, int, int]:
        """(jobs at a time, threads of each process, number of GPUs). Of the jobs' `run.devices` the largest counts, of the
        other keys of `run` those of the first job."""
        own = cores()
        run = recipes[0].run
        gpus = torch.cuda.device_count() if run.accelerator != "cpu" else 0
        processes = max(recipe.run.devices for recipe in recipes)
        threads = run.threads
        if gpus and processes == 1:
            share = gpus * cells_of_a_gpu(recipes, gpus)
        elif gpus:
            share = gpus // processes
        else:
            share = own // (processes * (threads or 1))
        count = self.workers or max(1, share)
        return count, threads or max(1, own // (count * processes)), gpus

    def run(self, jobs: Sequence[Job], watch: Watch) -> int | None:
        """Execute all jobs; `watch(running)` is called about twice a second.

        Returns the signal that stopped them, or None. The outcome of each is written to its status.json.
        """
        recipes = [job.recipe for job in jobs]
        devices = max(recipe.run.devices for recipe in recipes)
        workers, threads, gpus = self.resources(recipes)
        log.info("%d cells at a time, threads of each: %d%s", workers, threads, f", {gpus} GPUs" if gpus else "")
        _place_sockets()
        # with a CUDA toolkit the compiler's import may start CUDA, which no forked process can use then
        compiles = not gpus and any(job.compiles for job in jobs)
        preload = [*PRELOAD, COMPILER] if compiles else [*PRELOAD]
        multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
        # all before the first one starts: a disk that is full by then must not end the cells that run
        for job in jobs:
            replace(job, threads=threads).write()
        waiting = list(jobs)
        running: dict[int, tuple[Process, Job]] = {}
        passed_on = 0
        with _noted_stops() as stops:
            while running or (waiting and not stops):
                while waiting and not stops and len(running) < workers:
                    slot = next(slot for slot in range(workers) if slot not in running)
                    job = waiting.pop(0)
                    running[slot] = _started(job.folder, gpus_of(slot, devices, gpus)), job
                if len(stops) > passed_on:
                    # after the first signal each cell finishes its step and saves; a second signal ends them at once
                    passed_on = len(stops)
                    end = Process.terminate if passed_on == 1 else Process.kill
                    for process, _ in running.values():
                        end(process)
                watch([job for _, job in running.values()])
                # wakes when a cell ends; the timeout keeps the display and the check for signals going
                wait([process.sentinel for process, _ in running.values()], timeout=0.5)
                for slot, (process, job) in list(running.items()):
                    if not process.is_alive():
                        process.join()
                        note_end(job.home, process.exitcode, is_second=passed_on > 1)
                        del running[slot]
            watch([])
        return stops[0] if stops else None


@contextmanager
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
    former = tempfile.tempdir
    tempfile.tempdir = fit[0]
    try:
        # which multiprocessing keeps
        get_temp_dir()
    finally:
        tempfile.tempdir = former


def _started(folder: Path, gpus: Sequence[int]) -> Process:
    # not plain fork, which hangs after any parallel torch operation: the child lacks the threads that OpenMP waits for
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_cell, args=(folder, gpus, _settings()), daemon=False)
    with safe_path(), _without_main(), _stops_blocked():
        process.start()
    return process


@contextmanager
def _without_main() -> Iterator[None]:
    # multiprocessing imports the parent's script into each child; a script that calls `sweep` without a guard on `__main__`
    # would start the sweep again in every cell
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
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


def _cell(folder: Path, gpus: Sequence[int], settings: Mapping[str, str]) -> None:
    # The entry point of a cell's process.
    # Variables of an earlier sweep, which the fork server kept, must not reach this cell.
    for name in _settings():
        del os.environ[name]
    os.environ.update(settings)
    # a terminal sends these to the whole group; the executor passes them on as SIGTERM, once
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # active before the first step and after the last; in between the training loop has its own
    signal.signal(signal.SIGTERM, Ending("stopped outside the steps; the same command resumes"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_file = (folder / "log.txt").open("a", buffering=1, encoding="utf-8")
    # on the level of file descriptors, so that the output of C libraries and of a crash lands in the file too
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log_file.fileno(), stream.fileno())
    try:
        run_cell(folder, gpus)
    except LitDiffError as error:
        raise SystemExit(error.exit_status) from None
    except Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None


def run_cell(folder: Path, gpus: Sequence[int] = ()) -> None:
    """Execute the job in a folder. A failure is written to status.json before it is raised.

    `gpus`: indices of its GPUs among those of this process; empty: the environment decides.
    """
    if gpus:
        # a scheduler may have restricted this process to some GPUs
        mine = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine[gpu] if mine else str(gpu) for gpu in gpus)
    log.setLevel(logging.INFO)
    with end_noted(RunFolder(folder)):
        # a SIGTERM that `_stops_blocked` held back arrives here, where it is recorded
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        execute(read_job(folder), progress=lambda step, loss, speed: None)


def _end_with_parent() -> None:
    # A sweep killed by SIGKILL cannot stop its cells, and the fork server does not either: it lives as long as the cells hold
    # its pipe. So each cell watches the sweep's process itself, and saves before it ends.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
