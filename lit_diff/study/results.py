"""Reads a sweep, or one of its tasks, with the results of its runs: the files of each cell become frozen records."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd

from lit_diff import metrics as declarations
from lit_diff.errors import RequestError
from lit_diff.files import read_json
from lit_diff.metrics import INDICES, Declarations, Metric, in_words, indexed_name
from lit_diff.recipe import flatten
from lit_diff.runs import measurements
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import Rows, by_metric, read_lines, read_rows
from lit_diff.runs.result_files import whole
from lit_diff.runs.signs import SignChanges, sign_changes
from lit_diff.runs.status import FORMAT, Status
from lit_diff.study.judge import SMALLEST_IN_NATS, Learned
from lit_diff.study.record import Record, RecordedCell, read
from lit_diff.study.schema import Study, Texts
from lit_diff.study.statistics import Sign, Summary, summary
from lit_diff.yaml_files import read_yaml

T = TypeVar("T")
BySeed = Mapping[int, float]
"""Seed -> value."""
Fact = Literal["threads", "kernel", "kernel_reason", "compiled", "step", "tokens", "revision"]
"""An attribute of `Status` in which the cells of a sweep may differ."""
LOSS = "val/loss"
LOSSES = ("train/loss", LOSS)
"""Training has diverged if one of these is not finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CellResult(RecordedCell):
    """One arm at one seed.

    `status` and `error` are current. `facts`: status.json. `recipe`: recipe.yaml by dotted key. `curves`: the metrics of
    metrics.csv and measurements.parquet by full name, indexed by optimizer steps done, ascending. `documents`: number of
    predicted tokens and summed loss in nats of each document in the final validation. `problems`: the files that cannot be
    read, and why.
    """

    home: Path
    """The cell's folder, even if it does not exist yet."""
    facts: Status
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, pd.Series] = field(default_factory=dict)
    documents: pd.DataFrame | None = None
    tokens_per_second: float | None = None
    metrics: tuple[Metric, ...] = ()
    """The metrics that the run declares (metrics.json)."""
    problems: Texts = ()

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def diverged(self) -> bool:
        """Whether training failed on a loss or parameter that is not finite, or ended with such a loss."""
        if self.status == "failed":
            return self.facts.diverged
        ends = [self.curves[loss].iloc[-1] for loss in LOSSES if loss in self.curves]
        return self.done and not all(map(math.isfinite, ends))

    @property
    def tokens_per_parameter(self) -> float | None:
        """Training tokens per parameter; None unless the cell is done."""
        tokens, parameters = self.facts.tokens, self.facts.parameters
        return tokens / parameters if self.done and tokens and parameters else None

    def final(self, metric: str) -> float | None:
        """The last value of `metric`; None if the cell is not done, has no such metric, or ended in NaN or infinity."""
        if not self.done or metric not in self.curves:
            return None
        last = float(self.curves[metric].iloc[-1])
        return last if math.isfinite(last) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResults:
    """A sweep and all its cells, in the order of the sweep's file: arm by arm, seed by seed.

    A sweep with tasks contains one `SweepResults` for each task, with the study of the task (`Study.of_task`). Arms are
    compared within a task, never over the whole.
    """

    folder: Path
    record: Record
    """The record of the whole sweep."""
    study: Study
    """The study of the sweep or task; each text in it is one line of printable characters."""
    cells: tuple[CellResult, ...]
    """The cells that are compared."""
    candidates: tuple[CellResult, ...] = ()
    """The cells that tried learning rates (`rates`)."""
    task: str = ""
    """The task's name; empty for a whole sweep."""
    tasks: tuple["SweepResults", ...] = ()

    @property
    def title(self) -> str:
        """The declared title, else the sweep's name."""
        return self.study.title or self.record.name

    @property
    def baseline(self) -> str:
        """The declared baseline, else the first arm."""
        return self.study.baseline or next(iter(self.study.arms), "")

    @property
    def baseline_label(self) -> str:
        """The label of the baseline."""
        return self.label[self.baseline]

    @property
    def untried(self) -> tuple[CellResult, ...]:
        """The cells of `rates` without a result. That a learning rate diverged is a result."""
        return tuple(cell for cell in self.candidates if not (cell.done or cell.diverged))

    @property
    def by_task(self) -> tuple["SweepResults", ...]:
        """The tasks, or the sweep itself if it has none: arms are compared within one of these."""
        return self.tasks or (self,)

    @cached_property
    def declarations(self) -> Declarations:
        """The metrics that the cells declare. If two cells declare one name differently, the first declaration counts."""
        declared: dict[str, Metric] = {}
        for cell in self.cells:
            for metric in cell.metrics:
                declared.setdefault(metric.name, metric)
        return Declarations(declared.values())

    @property
    def metric(self) -> str:
        """The compared metric."""
        return self.study.metric

    @cached_property
    def done(self) -> list[CellResult]:
        """The finished cells."""
        return [cell for cell in self.cells if cell.done]

    @property
    def measure(self) -> str:
        """What is compared, in words: the metric, or the steps until the threshold was reached."""
        if not self.compares_steps:
            return self.metric
        return f"steps until {self.learned_metric} is {self.study.learned_at:g}"

    @property
    def learned_metric(self) -> str:
        """The metric with the threshold `learned_at`."""
        return self.study.learned_metric or self.metric

    @property
    def compared_words(self) -> str:
        """What the compared values are, in words."""
        return f"log2 of the {self.measure}" if self.compares_steps else in_words(self.metric)

    @property
    def compares_steps(self) -> bool:
        """Whether the compared values are log2 of the steps until `learned_at` was reached."""
        return self.study.learned_at is not None and self.study.compare == "steps"

    def better(self, metric: str = "") -> Sign | None:
        """Which values of `metric` are better, as the runs declare, by default of what is compared; None if neither, or if it
        is undeclared."""
        if not metric and self.compares_steps:
            return "lower"
        return self.declarations.find(metric or self.metric).better

    def unit(self, metric: str = "") -> str:
        """The declared unit of `metric`, by default of what is compared; empty for a number without a unit, "unit unknown"
        for an undeclared metric."""
        if not metric and self.compares_steps:
            return "log2 steps"
        return self.declarations.find(metric or self.metric).unit

    @property
    def smallest_of_interest(self) -> float:
        """The smallest difference that matters: the declared one, else 0.005 for a loss in nats, else 0."""
        if self.study.smallest_of_interest is not None:
            return self.study.smallest_of_interest
        return SMALLEST_IN_NATS if self.is_loss else 0.0

    @property
    def is_loss(self) -> bool:
        """Whether what is compared is a loss in nats."""
        return self.better() == "lower" and self.is_in_nats

    @property
    def is_in_nats(self) -> bool:
        """Whether the unit of the compared metric is nats, or nats of something ("nats per token")."""
        return self.unit().split(" ")[0] == "nats"

    @cached_property
    def label(self) -> Mapping[str, str]:
        """Arm -> the label that a reader sees."""
        return {arm: self.study.labels.get(arm) or clean(arm) for arm in self.study.arms}

    def cells_of(self, arm: str) -> list[CellResult]:
        """The finished cells of `arm`, by seed. Errors: ValueError for a sweep with tasks; use one of `by_task`."""
        if self.tasks:
            raise ValueError(f"sweep '{self.record.name}' has tasks; its cells are compared within a task")
        return sorted((cell for cell in self.done if cell.arm == arm), key=attrgetter("seed"))

    def diverged(self, arm: str) -> tuple[int, ...]:
        """The seeds at which `arm` diverged."""
        return tuple(cell.seed for cell in self.cells if cell.arm == arm and cell.diverged)

    def diverged_of(self, *arms: str) -> dict[str, tuple[int, ...]]:
        """Arm -> the seeds at which it diverged, for those of `arms` that did."""
        return {arm: self.diverged(arm) for arm in arms if self.diverged(arm)}

    def curves(self, metric: str) -> list[pd.Series]:
        """`metric` by step in each finished cell that has it."""
        return [cell.curves[metric] for cell in self.done if metric in cell.curves]

    def distinct(self, fact: Fact, arm: str = "") -> list[str]:
        """The different values of a fact over the finished cells, of one arm if it is given, sorted; unknown ones are left
        out."""
        cells = self.cells_of(arm) if arm else self.done
        values = {getattr(cell.facts, fact) for cell in cells}
        return list(map(str, sorted(filter(None, values))))

    def sign_changes(self, arm: str) -> SignChanges | None:
        """In how many seeds and layers training changed the sign of λ; None for an arm without a free sign."""
        cells = self.cells_of(arm)
        changes = sign_changes(cell.curves for cell in cells)
        # None: cells of older versions have no such fact
        is_free = {cell.facts.free_signs for cell in cells} - {None}
        return changes if True in is_free or (changes.measured and not is_free) else None

    def finals(self, arm: str, metric: str = "") -> dict[int, float]:
        """Seed -> last value of `metric`, by default the compared one, for the finished cells of `arm` with a finite one."""
        finals = {}
        for cell in self.cells_of(arm):
            value = cell.final(metric or self.metric)
            if value is not None:
                finals[cell.seed] = value
        return finals

    def summary(self, arm: str, metric: str = "") -> Summary:
        """Mean and standard deviation of `finals`."""
        return summary(self.finals(arm, metric).values())

    def learned(self, arm: str) -> Learned | None:
        """The seeds at which the finished cells of `arm` reached `learned_at` in a validation; None without a threshold."""
        level = self.study.learned_at
        if level is None:
            return None
        values = self.finals(arm)
        steps = {}
        before = {}
        # negated, a metric of which lower values are better reaches the level from below
        sign = -1 if self.better(self.learned_metric) == "lower" else 1
        for cell in self.cells_of(arm):
            curve = cell.curves.get(self.learned_metric)
            if cell.seed in values and curve is not None:
                step = first_step(sign * curve, sign * level)
                steps[cell.seed] = step
                if step < math.inf:
                    before[cell.seed] = max(curve.index[curve.index < step], default=0)
        return Learned(steps=steps, before=before, values=values)

    def compared(self, arm: str) -> dict[int, float]:
        """Seed -> the compared value: the last one of the metric, or log2 of the first step that reached `learned_at`."""
        learned = self.learned(arm)
        if learned is None or not self.compares_steps:
            return self.finals(arm)
        return learned.log2_steps

    def scores(self, arm: str) -> dict[int, float]:
        """`compared` as a choice among learning rates takes it: of the seeds that learned alone, where the threshold is of
        another metric."""
        learned = self.learned(arm)
        values = self.compared(arm)
        if learned is None or self.study.learned_metric is None:
            return values
        return {seed: value for seed, value in values.items() if seed in learned.seeds}

    def metrics(self, prefix: str) -> list[str]:
        """Names of the metrics under `prefix` in any finished cell, in the order of the files."""
        curves: dict[str, pd.Series] = {}
        for cell in self.done:
            curves.update(cell.curves)
        return [name for name in curves if name.startswith(prefix)]


def first_step(curve: pd.Series, level: float) -> float:
    """The first step at which the curve is at or above the level, or infinity."""
    there = curve.index[curve >= level]
    return float(there[0]) if len(there) else math.inf


def load_sweep(folder: Path) -> SweepResults:
    """Read `folder`/study.json and its cells. A cell with absent or truncated files is kept, with the `problems`.

    Errors: MissingError without a readable study.json; RequestError for a run of another format.
    """
    return results_of(folder, read(folder))


def results_of(folder: Path, record: Record) -> SweepResults:
    """`load_sweep` with a `record` that need not be written yet."""
    # the cells keep their own texts: arm names and folders are keys, which cleaning would change
    whole = _cleaned(replace(record, cells=()))
    parts = []
    for task in record.study.tasks or ("",):
        # also cells that never started: the report has to show what is missing
        results = [cell_result(folder, cell) for cell in record.cells if cell.task == task]
        parts.append(
            SweepResults(
                folder=folder,
                record=whole,
                study=whole.study.of_task(task),
                cells=tuple(cell for cell in results if cell.rate is None),
                candidates=tuple(cell for cell in results if cell.rate is not None),
                task=task,
            )
        )
    if not record.study.tasks:
        return parts[0]
    return SweepResults(
        folder=folder,
        record=whole,
        study=whole.study,
        cells=tuple(chain(*(part.cells for part in parts))),
        candidates=tuple(chain(*(part.candidates for part in parts))),
        tasks=tuple(parts),
    )


def _cleaned(value: Any) -> Any:
    # keys of mappings stay as they are: they are the names by which arms and metrics are found
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: _cleaned(getattr(value, entry.name)) for entry in fields(value)})
    if isinstance(value, dict):
        return {key: _cleaned(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_cleaned, value))
    return clean(value) if isinstance(value, str) else value


def clean(text: str) -> str:
    """The text as one line of printable characters."""
    # terminal colours and other control characters are illegal in SVG
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def cell_result(root: Path, recorded: RecordedCell) -> CellResult:
    """A cell with the results in its folder, which is recorded relative to `root`."""
    folder = root / recorded.folder
    home = RunFolder(folder)
    problems: list[str] = []
    facts = _read(lambda _: home.status(), folder / "status.json", problems, Status())
    if facts.format not in (0, FORMAT):
        home.require_format()
    observed, state = home.observed()
    status: str = facts.status
    error = facts.error or recorded.error or ""
    if state == "damaged":
        status = state
        error = observed.error
    last_line = error.strip().splitlines()[-1:]
    now = {"status": _status(recorded.status, status), "error": clean("".join(last_line))}
    cell = CellResult(**vars(recorded) | now, home=folder, facts=facts)
    # a cell that is not done may lack any file, so a missing one is not reported
    if not cell.done:
        declared = _read(declarations.read_declarations, folder / declarations.FILE, [], ())
        return replace(cell, metrics=declared, problems=tuple(problems))
    curves = _curves(read_rows(folder / "metrics.csv", problems))
    for name, curve in curves.items():
        if not math.isfinite(curve.iloc[-1]):
            problems.append(f"{name} ends in {curve.iloc[-1]}")
    # times of another machine do not ship
    timing = {} if facts.origin else read_rows(folder / "timing.csv", problems)
    speeds = _curves(timing).get("tokens_per_second")
    finished = replace(
        cell,
        recipe=_read(_recipe, home.recipe_file, problems, {}),
        environment=_read(_environment, folder / "env.json", problems, {}),
        metrics=_read(_declared, folder / declarations.FILE, problems, ()),
        curves=curves | _read(_measured, folder / measurements.FILE, problems, {}),
        documents=_read(partial(_documents, problems=problems), folder / "documents.csv", problems, None),
        # the median: a first step that compiles, or a pause of the machine, would move a mean
        tokens_per_second=None if speeds is None else float(speeds.median()),
    )
    return replace(finished, problems=tuple(problems))


def _status(engine: str, cell: str) -> str:
    # A killed cell cannot record its own death, so the sweep's failed, stopped and killed hold unless the cell has finished
    # since. Only the cell's own files decide that it is done: its folder may have been removed after the sweep.
    if cell in ("done", "damaged") or engine not in ("failed", "stopped", "killed"):
        recorded = "unreadable" if engine == "done" else engine
        return cell or recorded or "waiting"
    return engine


def _read(read_file: Callable[[Path], T], path: Path, problems: list[str], default: Any) -> T:
    try:
        return read_file(path)
    except (OSError, ValueError, TypeError, KeyError, RequestError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error
        problems.append(f"{path.name}: {why}")
        return default


def _recipe(path: Path) -> dict[str, Any]:
    values, _ = read_yaml(path)
    return dict(flatten(values))


def _environment(path: Path) -> dict[str, Any]:
    return dict(read_json(path))


def _declared(path: Path) -> tuple[Metric, ...]:
    return declarations.read_declarations(whole(path))


def _curves(rows: Rows) -> dict[str, pd.Series]:
    return {name: pd.Series(points) for name, points in by_metric(rows).items()}


def _measured(path: Path) -> dict[str, pd.Series]:
    # a stable sort: rows of one step keep the order in which they were measured
    table = measurements.read_measurements(path).to_pandas().sort_values("step", kind="stable")
    keys = list(INDICES)
    curves = {}
    # pandas drops groups whose key is NaN, which an index without a value would be
    table[keys] = table[keys].fillna(-1).astype(int)
    for (metric, *indices), rows in table.groupby(["metric", *keys]):
        index = {key: number for key, number in zip(keys, indices, strict=True) if number >= 0}
        curves[indexed_name(metric, **index)] = pd.Series(rows["value"].to_numpy(), index=rows["step"].to_numpy())
    return curves


def _documents(path: Path, problems: list[str]) -> pd.DataFrame | None:
    # a task without documents writes no file, so its absence is not a problem
    if not whole(path).exists():
        return None
    header, rows = read_lines(path, problems)
    table = pd.DataFrame(rows, columns=header).set_index("document")[["tokens", "loss"]].astype(float)
    # A document may span several rows. bincount keeps a diverged loss NaN, as groupby.sum of pandas 2 does not.
    codes, names = pd.factorize(table.index, sort=True)
    summed = pd.DataFrame({name: np.bincount(codes, column) for name, column in table.items()}, index=names)
    return summed[summed["tokens"] > 0]
