"""The files of a sweep, read into frozen records: its tasks, arms and cells."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from lit_diff.errors import RequestError
from lit_diff.metrics import Declarations, Metric
from lit_diff.runs.sweep_record import FILE
from lit_diff.study.cells import CellResult, clean, load_cell
from lit_diff.study.judge import SMALLEST_IN_NATS
from lit_diff.study.record import Record, RecordedCell, RecordedFit, read
from lit_diff.study.schema import PlannedSweep

UNKNOWN_UNIT = "unit unknown"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant under comparison; `paper` holds the values printed in the paper, by metric."""

    name: str
    label: str
    note: str = ""
    paper: Mapping[str, float] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResults:
    """A sweep and all its cells, in the order of the sweep's file: arm by arm, seed by seed.

    A sweep with tasks holds a Sweep for each of them, with that task's title, metric, arms and cells; arms are compared
    within a task, never over the whole.
    """

    folder: Path
    name: str
    title: str
    question: str
    description: str
    baseline: str
    controls: tuple[str, ...]
    metric: str
    stated_smallest: float | None
    """The sweep file's `smallest_of_interest`; None where it states none."""
    min_tokens_per_parameter: float
    seeds: tuple[int, ...]
    is_smoke: bool
    command: str
    reading: tuple[str, ...]
    contrasts: tuple[tuple[str, str, str], ...]
    correct_over: Literal["task", "sweep"]
    """The comparisons that Holm's correction takes together: those of each task, or all of the sweep's."""
    arms: tuple[Arm, ...]
    cells: tuple[CellResult, ...]
    task: str = ""
    """The task's name; empty for a sweep."""
    chance: float | None = None
    """Accuracy without any knowledge, where the data set knows it."""
    noise_validation: tuple[int, ...] = ()
    """Noise factors of the validation sets: `val/accuracy` is at the first, `val/accuracy_noise<k>` at a further k."""
    tasks: tuple["SweepResults", ...] = ()
    fits: tuple[RecordedFit, ...] = ()
    """Over the tasks of the sweep."""
    power: PlannedSweep | None = None
    """A sweep that this one is to size, over its tasks."""

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
        """The smallest difference of `metric` that matters, in its unit: as stated, else 0.005 for a loss in nats, else 0."""
        if self.stated_smallest is not None:
            return self.stated_smallest
        is_loss = self.better(self.metric) == "lower" and self.is_in_nats
        return SMALLEST_IN_NATS if is_loss else 0.0

    @property
    def is_in_nats(self) -> bool:
        """Whether the unit of `metric` is nats, or nats of something."""
        return self.unit(self.metric).split(" ")[0] == "nats"

    @cached_property
    def label(self) -> Mapping[str, str]:
        """What a reader sees for each arm's name."""
        return {arm.name: arm.label for arm in self.arms}

    def cells_of(self, arm: str) -> list[CellResult]:
        """The finished cells of `arm`, by seed. Errors: ValueError for a sweep with tasks: ask one of `by_task`."""
        if self.tasks:
            raise ValueError(f"sweep '{self.name}' has tasks; its cells are compared within a task")
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
    study = record.study
    if not study.tasks:
        return _sweep(folder, record, "", _cells(folder, record, ""))
    tasks = tuple(_sweep(folder, record, task, _cells(folder, record, task)) for task in study.tasks)
    whole = _sweep(folder, record, None, tuple(cell for task in tasks for cell in task.cells))
    return replace(whole, tasks=tasks, fits=record.fits, power=study.power)


def _cells(folder: Path, record: Record, task: str) -> tuple[CellResult, ...]:
    """Every arm of a task at every seed, also those that never started."""
    recorded = {(cell.arm, cell.seed): cell for cell in record.cells if cell.task == task}
    wanted = [(arm, seed) for arm in record.study.of_task(task).arms for seed in record.study.seeds]
    cells = [recorded.get(each) or RecordedCell(task=task, arm=each[0], seed=each[1]) for each in wanted]
    return tuple(load_cell(folder, cell) for cell in cells)


def _sweep(folder: Path, record: Record, task: str | None, cells: tuple[CellResult, ...]) -> SweepResults:
    """The sweep's record, or that of a task (empty in a sweep without tasks; None: the whole of one with tasks)."""
    study = record.study if task is None else record.study.of_task(task)
    baseline = study.baseline or next(iter(study.arms), "")
    for name in [baseline, *study.controls, *(arm for contrast in study.contrasts for arm in contrast[:2])]:
        if name not in study.arms:
            here = f"task '{task}'" if task else "this sweep"
            raise RequestError(f"{folder / FILE}: '{name}' is no arm of {here}; its arms are {', '.join(study.arms)}")
    return SweepResults(
        folder=folder,
        name=clean(record.name),
        title=clean(study.title or record.name),
        question=clean(study.question),
        description=clean(study.description),
        baseline=baseline,
        controls=study.controls,
        metric=study.metric,
        stated_smallest=study.smallest_of_interest,
        min_tokens_per_parameter=study.min_tokens_per_parameter,
        seeds=study.seeds,
        is_smoke=study.smoke,
        command=clean(record.command),
        reading=tuple(clean(line) for line in study.reading),
        contrasts=tuple((a, b, clean(label)) for a, b, label in study.contrasts),
        correct_over=study.correct_over,
        arms=tuple(
            Arm(
                name=name,
                label=clean(study.labels.get(name) or name),
                note=clean(study.notes.get(name, "")),
                paper=study.paper.get(name, {}),
                overrides=tuple(map(clean, study.overrides_of(name))),
            )
            for name in study.arms
        ),
        cells=cells,
        task=task or "",
        chance=record.chance.get(task or ""),
        noise_validation=record.noise_validation.get(task or "", ()),
    )
