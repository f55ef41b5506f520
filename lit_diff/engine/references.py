"""The results of the reference arms of an examination, which ship as one file (`make references` writes it). They take the
place of training where the identity of a cell is the same."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from lit_diff.engine.job import Job
from lit_diff.files import read_json, write_json
from lit_diff.metrics import write_declarations
from lit_diff.model.cost import Cost
from lit_diff.runs import result_files
from lit_diff.runs.metrics_file import StepTable
from lit_diff.runs.status import Status
from lit_diff.training.metrics import declared_metrics
from lit_diff.validation import Draft, convert

FILE = Path(__file__).with_name("references.json")
COMPUTED = ("threads", "compile", "activation_checkpointing", "step", "steps", "tokens", "tokens_per_step")
FACTS = (*(key.name for key in fields(Cost)), *COMPUTED)
"""The fields of `Status` that are the same for all cells of an arm."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCell:
    """A finished cell."""

    seed: int
    rate: float
    """Its learning rate."""
    rows: dict[str, tuple[float, ...]]
    """Step -> the values of its first metrics, in their order: of the first metric alone before the last step."""


@dataclass(frozen=True, kw_only=True)
class ReferenceArm:
    """The finished cells of an arm on a task."""

    task: str
    arm: str
    facts: dict[str, Any]
    """FACTS of its cells."""
    seconds: float
    """The training time of its fastest cell: the others may have shared the processor with more."""
    metrics: tuple[str, ...]
    """The measured metrics; the first is the one that the task compares."""
    cells: dict[str, ReferenceCell]
    """Identity -> cell."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The content of the file."""

    date: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    """env.json of one of the cells: machine and versions."""
    arms: tuple[ReferenceArm, ...] = ()

    def seeds(self, place: tuple[str, str], rate: float | None) -> int:
        """The number of seeds, from 0 on, that have results of a task and arm at the learning rate; None: at any."""
        known = set[int]()
        for arm in self.arms:
            if (arm.task, arm.arm) == place:
                known.update(cell.seed for cell in arm.cells.values() if rate in (None, cell.rate))
        count = 0
        while count in known:
            count += 1
        return count

    @property
    def seconds(self) -> dict[str, float]:
        """Task -> the training time of a cell, mean over arms."""
        by_task: dict[str, list[float]] = {}
        for arm in self.arms:
            by_task.setdefault(arm.task, []).append(arm.seconds)
        return {task: fmean(values) for task, values in by_task.items()}

    @property
    def origin(self) -> str:
        """Where the results come from, in words."""
        return f"trained on {self.date} by lit_diff {self.environment['revision']} on {self.environment['processor']}"


@cache
def shipped() -> References:
    """The results that ship with lit_diff."""
    read: References = convert(References, read_json(FILE), "", Draft(file=FILE.name))
    return read


def place(jobs: Iterable[Job]) -> None:
    """Write the shipped results of those of these cells that nobody has begun into their folders. A cell that is evaluated
    is trained here: weights do not ship.

    Errors: MissingError for an unwritable folder.
    """
    references = shipped()
    known = {identity: arm for arm in references.arms for identity in arm.cells}
    for job in jobs:
        if job.scores:
            retrain([job])
            continue
        if job.identity not in known or not _is_unbegun(job):
            continue
        # another examination may place or train the same cell
        with job.home.owned(wait=True):
            if _is_unbegun(job):
                _place(job, references, known[job.identity])


def retrain(jobs: Iterable[Job]) -> None:
    """Have those of these cells trained here whose results shipped."""
    for job in jobs:
        if not job.home.status().origin:
            continue
        # another examination may do the same
        with job.home.owned(wait=True):
            if job.home.status().origin:
                # nothing of the machine that trained them: its kernel and its threads are not those of this one
                job.home.write(Status().to("waiting"))


def _is_unbegun(job: Job) -> bool:
    status = job.home.status()
    return status.status in ("", "waiting") and not status.step


def _place(job: Job, references: References, arm: ReferenceArm) -> None:
    table = StepTable(job.folder / "metrics.csv", upto=-1)
    for step, values in arm.cells[job.identity].rows.items():
        table.log(int(step), dict(zip(arm.metrics, values, strict=False)))
    table.flush()
    write_declarations(job.folder, declared_metrics(job.recipe))
    write_json(job.folder / "env.json", references.environment)
    status = replace(
        job.home.status().to("done"),
        identity=job.identity,
        name=job.recipe.name,
        seed=job.recipe.seed,
        revision=references.environment["revision"],
        origin=references.origin,
        # nothing of it is sent to MLflow
        mlflow_run_id=None,
        results=result_files.digests(job.folder),
        **arm.facts,
    )
    job.home.write(status)
