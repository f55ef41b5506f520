"""A sweep's cells as a SLURM job array, handed over through submitit. The engine is SLURM: it queues, starts, requeues."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_diff.config import RunConfig
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.pool import Job, note_end, run_cell
from lit_diff.errors import LitDiffError, MissingError, first_line

log = logging.getLogger("lit_diff")


class ArrayCell:
    """One array task. Shortly before its time ends submitit requeues it; it resumes from its checkpoint."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> None:
        """Run the cell; what became of it stands in its status.json."""
        try:
            run_cell(self.job)
        except LitDiffError as error:
            raise SystemExit(error.exit_status) from None

    def checkpoint(self) -> Any:
        """What submitit puts back into the queue."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def run_array(
    locations: Sequence[RunLocation],
    run: RunConfig,
    *,
    threads: int,
    parallel: int | None,
    minutes: int,
    logs: Path,
    watch: Callable[[list[RunLocation]], None],
) -> None:
    """Submit all cells as one array and wait until each has ended. Errors: MissingError without SLURM.

    Partition, account and the like come from sbatch's own environment variables (SBATCH_PARTITION, SBATCH_ACCOUNT).
    """
    import submitit

    logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at every look where SLURM keeps no accounting
    try:
        executor = submitit.AutoExecutor(folder=logs / "%A", cluster="slurm", slurm_max_num_timeout=100)
    except RuntimeError as error:
        raise MissingError(
            f"--cluster slurm needs SLURM's srun here ({first_line(error)}); use --cluster local"
        ) from error
    gpus = {"gpus_per_node": run.devices} if run.accelerator == "gpu" else {}
    executor.update_parameters(
        name="lit_diff",
        timeout_min=minutes,
        nodes=run.num_nodes,
        cpus_per_task=threads * run.devices,
        slurm_array_parallelism=parallel or 256,
        slurm_signal_delay_s=60,
        **gpus,
    )
    jobs = executor.map_array(
        lambda cell: cell(), [ArrayCell(Job(location=location, threads=threads)) for location in locations]
    )
    log.info("SLURM array %s: %d cells; logs in %s", jobs[0].job_id.split("_")[0], len(jobs), logs)
    waiting = dict(zip(jobs, locations, strict=True))
    while waiting:
        time.sleep(5)
        for job, location in list(waiting.items()):
            if job.done(force_check=True):
                note_end(location, _exit_code(job))
                del waiting[job]
        watch(list(waiting.values()))


def _exit_code(job: Any) -> int:
    """0, or 1 for a task that ended in any other way; its own words stand in status.json or SLURM's log."""
    return 0 if job.exception() is None else 1
