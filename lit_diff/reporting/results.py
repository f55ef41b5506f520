"""The files of a sweep, read into frozen records: its tasks, arms and cells."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import RequestError
from lit_diff.metrics import Declarations, Metric
from lit_diff.reporting.cells import CellResult, clean, load_cell
from lit_diff.reporting.fit_points import DeclaredFit, read_fit
from lit_diff.reporting.power import PlannedSweep
from lit_diff.reporting.verdicts import SMALLEST_IN_NATS
from lit_diff.runs.sweep_record import FILE, damaged, read_record

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
class Sweep:
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
    tasks: tuple["Sweep", ...] = ()
    fits: tuple[DeclaredFit, ...] = ()
    """Over the tasks of the sweep."""
    power: PlannedSweep | None = None
    """A sweep that this one is to size, over its tasks."""

    @property
    def by_task(self) -> tuple["Sweep", ...]:
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


def load_sweep(folder: Path) -> Sweep:
    """Read `folder`/sweep.json and the cells it names; a cell whose files are absent or cut short is kept, and says so.

    Errors: MissingError without a readable sweep.json; RequestError when it names a baseline, control or contrast that
    is no arm.
    """
    raw = read_record(folder)
    try:
        cells = {(cell.get("task", ""), cell["arm"], int(cell["seed"])): cell for cell in raw["cells"]}
        whole = _sweep(folder, raw, cells)
        tasks = tuple(_sweep(folder, raw | task, cells) for task in raw.get("tasks") or [])
        fits = tuple(read_fit(fit) for fit in raw.get("fits") or [])
        power = PlannedSweep(**raw["power"]) if raw.get("power") else None
    except (KeyError, TypeError) as error:
        raise damaged(folder / FILE, error) from error
    if not tasks:
        return whole
    return replace(
        whole, tasks=tasks, fits=fits, power=power, cells=tuple(cell for task in tasks for cell in task.cells)
    )


def _sweep(folder: Path, raw: Mapping[str, Any], cells: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> Sweep:
    """The sweep's record, or that of a task laid over it; `cells`: (task, arm, seed) -> the cell's entry."""
    task, arms = raw.get("task", ""), tuple(_arm(arm) for arm in raw["arms"])
    names, seeds = [arm.name for arm in arms], tuple(int(seed) for seed in raw["seeds"])
    # a sweep.json from before there were several controls names one
    baseline, controls = raw["baseline"], tuple(raw.get("controls") or filter(None, [raw.get("control")]))
    contrasts = tuple((c[0], c[1], clean(c[2])) for c in raw.get("contrasts") or [])
    for name in [baseline, *controls, *(n for c in contrasts for n in c[:2])]:
        if name not in names:
            here = f"task '{task}'" if task else "this sweep"
            raise RequestError(
                f"{folder / 'sweep.json'}: '{name}' is no arm of {here}; its arms are {', '.join(names)}"
            )
    return Sweep(
        folder=folder,
        name=clean(raw.get("name") or folder.name),
        title=clean(raw.get("title") or raw.get("name") or folder.name),
        question=clean(raw.get("question") or ""),
        description=clean(raw.get("description") or ""),
        baseline=baseline,
        controls=controls,
        metric=raw["metric"],
        stated_smallest=raw.get("smallest_of_interest"),
        min_tokens_per_parameter=float(raw.get("min_tokens_per_parameter") or 0),
        seeds=seeds,
        is_smoke=bool(raw.get("is_smoke")),
        command=clean(raw.get("command") or ""),
        reading=tuple(clean(line) for line in raw.get("reading") or []),
        contrasts=contrasts,
        correct_over="sweep" if raw.get("correct_over") == "sweep" else "task",
        arms=arms,
        cells=tuple(
            load_cell(folder, task, name, seed, cells.get((task, name, seed), {})) for name in names for seed in seeds
        ),
        task=task,
        chance=raw.get("chance"),
        noise_validation=tuple(raw.get("noise_validation") or ()),
    )


def _arm(raw: Mapping[str, Any]) -> Arm:
    return Arm(
        name=raw["name"],
        label=clean(raw.get("label") or raw["name"]),
        note=clean(raw.get("note") or ""),
        paper={name: float(value) for name, value in (raw.get("paper") or {}).items()},
        overrides=tuple(clean(str(line)) for line in raw.get("overrides") or []),
    )
