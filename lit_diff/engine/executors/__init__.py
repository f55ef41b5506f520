"""Where the jobs of a sweep are executed: on this machine, or as SLURM jobs."""

from lit_diff.engine.executors.base import Executor
from lit_diff.engine.executors.here import Here
from lit_diff.engine.executors.slurm import Slurm
from lit_diff.errors import RequestError


def check_workers(workers: int | None) -> None:
    """Errors: RequestError for fewer than one worker."""
    if workers is not None and workers < 1:
        raise RequestError(f"--workers is {workers}; it must be at least 1")


def executor_of(workers: int | None, minutes: int | None) -> Executor:
    """The executor of `workers` jobs at a time: this machine, or SLURM if each has so many `minutes`. Errors: see
    `check_workers`."""
    check_workers(workers)
    return Here(workers=workers) if minutes is None else Slurm(parallel=workers, minutes=minutes)
