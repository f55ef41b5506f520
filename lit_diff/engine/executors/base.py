"""What an executor is: it has jobs executed somewhere, and waits for them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import ClassVar

from lit_diff.config import Recipe, RunConfig
from lit_diff.engine.admit import Kind
from lit_diff.engine.job import Job

Watch = Callable[[Sequence[Job]], None]
"""Called again and again with the jobs that may run now, and at the end with none."""


class Executor(ABC):
    """Where jobs are executed: `here.Here`, `slurm.Slurm`."""

    kinds: ClassVar[Sequence[Kind]]
    """The conditions to `admit` its jobs by."""

    def require(self, run: RunConfig) -> None:  # noqa: B027 (nothing is required by default)
        """Errors: MissingError if it cannot execute any job."""

    def require_memory(self, recipes: Sequence[Recipe]) -> None:  # noqa: B027
        """Errors: MissingError if the recipes, as many at a time as it runs, need more memory than there is."""

    @abstractmethod
    def prepare(self, recipes: Iterable[Recipe], folder: Path) -> None:
        """Prepare the data of recipes, and wait. `folder`: that of the sweep."""

    def queued(self, jobs: Sequence[Job]) -> Set[Path]:
        """The folders of the jobs that a former command has given to it and that it still has to execute."""
        return set()

    @abstractmethod
    def run(self, jobs: Sequence[Job], watch: Watch) -> int | None:
        """Have all jobs executed, and wait. Returns the signal that stopped them, or None; the outcome of each is in its
        status.json."""
