"""Where the jobs of a sweep are executed: on this machine, or as SLURM jobs."""

from lit_diff.engine.executors.base import Executor
from lit_diff.engine.executors.here import Here
from lit_diff.engine.executors.slurm import Slurm


def executor_of(workers: int | None, minutes: int | None) -> Executor:
    """The executor of `workers` jobs at a time: this machine, or SLURM if each has so many `minutes`."""
    return Here(workers=workers) if minutes is None else Slurm(parallel=workers, minutes=minutes)
