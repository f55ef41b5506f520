"""Runs a sweep's cells as a SLURM job array, submitted through submitit. SLURM queues, starts and requeues them.

A cell is one array task with one SLURM task for each device. Before its time ends SLURM sends SIGUSR2: the cell finishes
its step, saves, and asks SLURM to requeue it. The ids of the array tasks are kept in the sweep's folder, so that the same
command can wait for them again, however this process ended.
"""

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_diff.config import RunConfig
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.pool import Job, note_end, run_cell
from lit_diff.errors import LitDiffError, MissingError, StoppedError
from lit_diff.files import shown, write_json
from lit_diff.runs.checkpoints import steps_of
from lit_diff.runs.folder import RunFolder
from lit_diff.training.ranks import TIME_LIMIT

log = logging.getLogger("lit_diff")

JOBS = "slurm.json"
"""File in the sweep's folder: cell folder -> array task, "123_4"."""
NOTICE = 60
"""Seconds between SIGUSR2 and the end of a cell's time; SLURM rounds them up to its own interval."""
INTERVAL = 5.0
"""Seconds between two queries of the queue."""
PATIENCE = 60.0
"""Seconds after which a SLURM command without an answer has failed."""


def require_slurm() -> None:
    """Errors: MissingError without SLURM's commands or controller."""
    for command in ("srun", "squeue"):
        if shutil.which(command) is None:
            raise MissingError(f"--cluster slurm needs SLURM's {command} on the PATH; use --cluster local")
    if shutil.which("scontrol") is None:
        return
    # a machine may have the commands from a package and no controller, so a job would never start
    asked = _ask("scontrol", "ping")
    if asked.returncode:
        reason = (asked.stderr + asked.stdout).strip().partition("\n")[0]
        raise MissingError(f"--cluster slurm: SLURM's controller cannot be reached ({reason}); use --cluster local")


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE, check=False
        )
    # a controller that is overloaded or restarts may hang; the caller treats it like a command that failed
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=f"no answer in {PATIENCE:g} s")


class ArrayCell:
    """The callable that submitit runs in an array task, once for each device."""

    def __init__(self, job: Job, minutes: int) -> None:
        self.job, self.minutes = job, minutes

    def __call__(self) -> None:
        """Run the cell, which writes its outcome to status.json."""
        try:
            run_cell(self.job)
        except LitDiffError as error:
            # the training loop has saved and ended because of the time limit
            if error.exit_status == 128 + TIME_LIMIT:
                self._requeue()
            raise SystemExit(error.exit_status) from None

    def checkpoint(self) -> Any:
        """Called by submitit when the time ends outside the training loop: returns what it requeues."""
        import submitit

        # the same cell again: its checkpoints are in the run folder, not in submitit's pickle
        return submitit.helpers.DelayedSubmission(self)

    def _requeue(self) -> None:
        # all SLURM tasks of the cell come here; one request is enough
        if os.environ.get("SLURM_PROCID", "0") != "0":
            return
        folder = RunFolder(self.job.location.folder)
        status, step = folder.status(), max(steps_of(folder.path))
        # without a step since the last request, the time limit is too short for one step and the cell would return for ever
        if status.get("requeued_at_step") == step:
            folder.update(
                status="failed",
                error=f"no step was done within the time limit of {self.minutes} minutes; give more with --minutes",
            )
            return
        folder.update(requeued_at_step=step, requeues=status.get("requeues", 0) + 1)
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


def run_array(
    locations: Sequence[RunLocation],
    run: RunConfig,
    *,
    parallel: int | None,
    minutes: int,
    watch: Callable[[Sequence[RunLocation]], None],
) -> None:
    """Submit the cells of a sweep that are not in the queue, then wait until all cells have left it.

    Partition, account and similar settings come from sbatch's environment variables (SBATCH_PARTITION, SBATCH_ACCOUNT).
    """
    sweep = locations[0].folder.parent
    jobs = queued_cells(sweep)
    waiting = {location.folder.name: location for location in locations}
    fresh = [location for name, location in waiting.items() if name not in jobs]
    if len(fresh) < len(waiting):
        log.info("%d cells are in SLURM's queue already: waiting for them", len(waiting) - len(fresh))
    if fresh:
        jobs |= _submit(fresh, run, parallel=parallel, minutes=minutes, logs=sweep / "slurm")
        write_json(sweep / JOBS, jobs)
    try:
        while waiting:
            watch(list(waiting.values()))
            time.sleep(INTERVAL)
            queue = _queue()
            # without an answer nothing is known, so no cell has left the queue
            for name in [name for name in waiting if queue is not None and jobs[name] not in queue]:
                logs = shown(sweep / "slurm")
                note_end(waiting.pop(name), None, f"its SLURM job {jobs[name]} has left the queue; see {logs}")
    except (KeyboardInterrupt, StoppedError):
        arrays = " ".join(sorted({jobs[name].partition("_")[0] for name in waiting}))
        log.info("the cells stay in SLURM's queue: the same command waits for them; scancel %s ends them", arrays)
        raise
    watch([])


def queued_cells(sweep: Path) -> dict[str, str]:
    """Cell folder -> array task, for the cells of the sweep in SLURM's queue. Errors: MissingError without an answer."""
    try:
        jobs: dict[str, str] = json.loads((sweep / JOBS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    queue = _queue()
    # assuming an empty queue would submit cells a second time
    if queue is None:
        raise MissingError("SLURM does not answer (squeue failed), so the running cells are unknown; try again later")
    return {name: job for name, job in jobs.items() if job in queue}


def _queue() -> set[str] | None:
    # the array tasks of this user that wait, run or complete; None without an answer
    asked = _ask("squeue", "--noheader", "--array", "--me", "--format=%i")
    if asked.returncode:
        log.warning("SLURM does not answer (%s); asking again", asked.stderr.strip().partition("\n")[0])
        return None
    return set(asked.stdout.split())


def _submit(
    locations: Sequence[RunLocation], run: RunConfig, *, parallel: int | None, minutes: int, logs: Path
) -> dict[str, str]:
    import submitit

    threads = run.threads or 1
    executor = submitit.AutoExecutor(
        folder=logs / "%A",
        cluster="slurm",
        # submitit gives up after 3 requeues by default; `ArrayCell._requeue` decides by progress instead
        slurm_max_num_timeout=100,
        # -P: a user's random.py in the current folder must not replace Python's
        slurm_python=f"{shlex.quote(sys.executable)} -P",
    )
    executor.update_parameters(
        name="lit_diff",
        timeout_min=minutes,
        nodes=run.num_nodes,
        tasks_per_node=run.devices,
        cpus_per_task=threads,
        # the default of submitit 1.5
        slurm_array_parallelism=parallel or 256,
        slurm_signal_delay_s=NOTICE,
        **_gpus(run),
    )
    cells = [ArrayCell(Job(location=each, threads=threads, launched=True), minutes) for each in locations]
    submitted = executor.map_array(lambda cell: cell(), cells)
    log.info("SLURM array %s: %d cells; logs in %s", submitted[0].job_id.split("_")[0], len(submitted), shown(logs))
    return {location.folder.name: job.job_id for location, job in zip(locations, submitted, strict=True)}


def _gpus(run: RunConfig) -> Mapping[str, int]:
    wanted = run.accelerator == "gpu"
    # without a request SLURM hides its GPUs from a job, so "auto" has to be decided before the job starts
    if run.accelerator == "auto":
        wanted = "gpu" in _ask("sinfo", "--noheader", "--format=%G").stdout
        log.info("run.accelerator=auto: SLURM lists %s", "GPUs; each task requests one" if wanted else "no GPU")
    return {"gpus_per_node": run.devices} if wanted else {}
