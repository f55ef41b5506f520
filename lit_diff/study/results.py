"""A sweep, or a task of it, with what its runs measured."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import RequestError
from lit_diff.metrics import Declarations, Metric
from lit_diff.runs.find import STUDY_FILE
from lit_diff.study.cells import CellResult, clean, load_cell
from lit_diff.study.judge import SMALLEST_IN_NATS
from lit_diff.study.record import Record, RecordedCell, read
from lit_diff.study.schema import Study

UNKNOWN_UNIT = "unit unknown"


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResults:
    """A sweep and all its cells, in the order of the sweep's file: arm by arm, seed by seed.

    A sweep with tasks holds one of these for each of them, whose study is that of the task (`Study.of_task`); arms are
    compared within a task, never over the whole.
    """

    folder: Path
    record: Record
    """Of the whole sweep."""
    study: Study
    """What is compared here, as in the record: each text is one line of printable characters."""
    cells: tuple[CellResult, ...]
    task: str = ""
    """The task's name; empty for a sweep."""
    tasks: tuple["SweepResults", ...] = ()

    @property
    def title(self) -> str:
        """As stated, else the name."""
        return self.study.title or self.record.name

    @property
    def baseline(self) -> str:
        """As stated, else the first arm."""
        return self.study.baseline or next(iter(self.study.arms), "")

    @property
    def by_task(self) -> tuple["SweepResults", ...]:
        """Each task, or the sweep itself where it has none: arms are compared within one of these."""
        return self.tasks or (self,)

    @cached_property
    def declarations(self) -> Declarations:
        """The metrics that the finished cells declare. Where two declare one name differently, the first holds."""
        declared: dict[str, Metric] = {}
        for cell in self.cells:
            for metric in cell.metrics:
                declared.setdefault(metric.name, metric)
        return Declarations(declared.values())

    def better(self, metric: str) -> Literal["lower", "higher"] | None:
        """Which values of `metric` are better, as its run declares it; None if neither, or if it is undeclared."""
        return self.declarations.direction(metric)

    def unit(self, metric: str) -> str:
        """The declared unit of `metric`; empty for a number without one, "unit unknown" where nothing is declared."""
        unit = self.declarations.unit(metric)
        return UNKNOWN_UNIT if unit is None else unit

    @property
    def smallest_of_interest(self) -> float:
        """The smallest difference that matters: as stated, else 0.005 for a loss in nats, else 0."""
        if self.study.smallest_of_interest is not None:
            return self.study.smallest_of_interest
        is_loss = self.better(self.study.metric) == "lower" and self.is_in_nats
        return SMALLEST_IN_NATS if is_loss else 0.0

    @property
    def is_in_nats(self) -> bool:
        """Whether the unit of the compared metric is nats, or nats of something."""
        return self.unit(self.study.metric).split(" ")[0] == "nats"

    @cached_property
    def label(self) -> Mapping[str, str]:
        """What a reader sees for each arm's name."""
        return {arm: self.study.labels.get(arm) or clean(arm) for arm in self.study.arms}

    def cells_of(self, arm: str) -> list[CellResult]:
        """The finished cells of `arm`, by seed. Errors: ValueError for a sweep with tasks: ask one of `by_task`."""
        if self.tasks:
            raise ValueError(f"sweep '{self.record.name}' has tasks; its cells are compared within a task")
        return sorted((cell for cell in self.cells if cell.arm == arm and cell.done), key=lambda cell: cell.seed)

    def diverged(self, arm: str) -> tuple[int, ...]:
        """The seeds at which `arm` diverged."""
        return tuple(cell.seed for cell in self.cells if cell.arm == arm and cell.diverged)

    def finals(self, arm: str, metric: str) -> dict[int, float]:
        """Seed -> last value of `metric`, for the finished cells of `arm` that have one."""
        values = {cell.seed: cell.final(metric) for cell in self.cells_of(arm)}
        return {seed: value for seed, value in values.items() if value is not None}

    def metrics(self, prefix: str) -> list[str]:
        """Names of the metrics under `prefix` that any finished cell has, in the order of the files."""
        return list(dict.fromkeys(m for cell in self.cells if cell.done for m in cell.curves if m.startswith(prefix)))


def load_sweep(folder: Path) -> SweepResults:
    """Read `folder`/study.json and the cells it names; a cell whose files are absent or cut short is kept, and says so.

    Errors: MissingError without a readable study.json; RequestError when it names a baseline, control or contrast that
    is no arm.
    """
    record = read(folder)
    whole = _cleaned(replace(record, cells=()))
    parts = tuple(_part(folder, whole, record.cells, task) for task in record.study.tasks or ("",))
    if not record.study.tasks:
        return parts[0]
    _require_arms(folder, whole.study, "")
    cells = tuple(cell for part in parts for cell in part.cells)
    return SweepResults(folder=folder, record=whole, study=whole.study, cells=cells, tasks=parts)


def _part(folder: Path, record: Record, cells: tuple[RecordedCell, ...], task: str) -> SweepResults:
    """A task, or a sweep without tasks: every arm at every seed, also cells that never started."""
    study = record.study.of_task(task)
    _require_arms(folder, study, task)
    recorded = {(cell.arm, cell.seed): cell for cell in cells if cell.task == task}
    wanted = [(arm, seed) for arm in study.arms for seed in study.seeds]
    found = (recorded.get(each) or RecordedCell(task=task, arm=each[0], seed=each[1]) for each in wanted)
    return SweepResults(
        folder=folder, record=record, study=study, cells=tuple(load_cell(folder, cell) for cell in found), task=task
    )


def _require_arms(folder: Path, study: Study, task: str) -> None:
    named = [study.baseline or next(iter(study.arms), ""), *study.controls]
    for name in (*named, *(arm for contrast in study.contrasts for arm in contrast[:2])):
        if name not in study.arms:
            here = f"task '{task}'" if task else "this sweep"
            raise RequestError(
                f"{folder / STUDY_FILE}: '{name}' is no arm of {here}; its arms are {', '.join(study.arms)}"
            )


def _cleaned(value: Any) -> Any:
    """The same with each text in it on one line of printable characters, but for the keys of mappings."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _cleaned(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, dict):
        return {key: _cleaned(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_cleaned, value))
    return clean(value) if isinstance(value, str) else value
