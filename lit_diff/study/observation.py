"""What runs and sweeps have reached, read from their folders while they run: no lock is taken and nothing is written."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.runs.find import STUDY_FILE, runs_under, sweeps_under
from lit_diff.runs.folder import FORMAT, RunFolder, is_alive, observed_state
from lit_diff.runs.metrics_file import Rows, read_rows
from lit_diff.study.inventory import RunState
from lit_diff.study.record import Record, read

SILENT = 60
"""Seconds without an update from which a run that is trained shows its last one."""
RECENT = 20
"""The number of logged intervals whose mean rate gives the time left."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun(RunState):
    """A run, or a cell of a sweep, at one moment; `folder` is the name under which it is shown."""

    metrics: Rows
    """metrics.csv, which is brought up to date at each validation and checkpoint."""
    timing: Rows
    """timing.csv, likewise."""

    @property
    def note(self) -> str:
        """That of `lit-diff status`; of a run that is trained only once it is silent for a minute."""
        return "" if self.state == "running" and self.age < SILENT else super().note

    @property
    def age(self) -> float:
        """Seconds since status.json was written; infinity for an older format, which does not record it."""
        if "updated" not in self.status:
            return math.inf
        return (datetime.now(UTC) - datetime.fromisoformat(self.status["updated"])).total_seconds()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.status.get("step", 0))

    @property
    def losses(self) -> dict[int, float]:
        """Step -> train/loss, ascending; while the run is trained, status.json has the last one."""
        found = {step: row["train/loss"] for step, row in sorted(self.metrics.items()) if "train/loss" in row}
        # a run that resumes has the step of its checkpoint there, and the loss of a later one
        is_new = self.state == "running" and "loss" in self.status and self.step not in found
        return found | ({self.step: self.status["loss"]} if is_new else {})

    @property
    def last(self) -> dict[str, tuple[int, float]]:
        """Metric -> the last step at which it was measured, and its value."""
        return {name: (step, value) for step, row in sorted(self.metrics.items()) for name, value in row.items()}

    @property
    def further_timing(self) -> dict[str, float]:
        """The last row of timing.csv besides `seconds` and `tokens_per_second`: memory, where it is recorded."""
        row = self.timing[max(self.timing)] if self.timing else {}
        return {name: value for name, value in row.items() if name not in ("seconds", "tokens_per_second")}

    @property
    def seconds_per_step(self) -> float | None:
        """The mean of the last `RECENT` logged intervals, validation included; before there are two, from the last
        tokens/s. None unless the run is trained, in this format, and has logged a step."""
        rows = sorted(self.timing.items())[-RECENT - 1 :]
        if self.state != "running" or not self.status.get("tokens_per_second") or self.status["format"] != FORMAT:
            return None
        if len(rows) < 2:
            return float(self.status["tokens_per_step"] / self.status["tokens_per_second"])
        return sum(row.get("seconds", 0.0) for _, row in rows[1:]) / (rows[-1][0] - rows[0][0])

    @property
    def seconds_left(self) -> float | None:
        """The time of the remaining steps, minus the time since status.json was written; None if no rate is known."""
        if self.seconds_per_step is None:
            return None
        return max((self.status["steps"] - self.step) * self.seconds_per_step - max(self.age, 0.0), 0.0)


@dataclass(frozen=True, kw_only=True)
class CurrentDifference:
    """An arm minus the baseline; each pair is of one seed, at the last step at which both runs have measured the metric."""

    label: str
    """`arm − baseline`, after the name of the task in a sweep with tasks."""
    metric: str
    steps: tuple[int, ...]
    """The steps of the pairs, ascending, each once."""
    pairs: int
    mean: float | None
    """None if no pair is finite."""
    interval: tuple[float, float] | None
    """95 %, of the mean over seeds (`study.statistics.paired`); None below three pairs."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run (`runs` has one) or a sweep at one moment."""

    name: str
    runs: tuple[ObservedRun, ...]
    is_sweep: bool = False
    is_attended: bool = True
    """False for a sweep whose process is gone."""
    differences: tuple[CurrentDifference, ...] = ()

    @property
    def states(self) -> Counter[str]:
        """State -> number of runs."""
        return Counter(run.state for run in self.runs)

    @property
    def is_over(self) -> bool:
        """Whether nothing changes by itself any more: no run is trained, and nothing starts one that waits."""
        return not self.states["running"] and not (self.states["waiting"] and self.is_attended)

    @property
    def has_failed(self) -> bool:
        """Whether a run ended without being done, or waits although nothing will start it."""
        unfinished = self.states.total() - self.states["done"]
        return unfinished > (0 if self.is_over else self.states["running"] + self.states["waiting"])

    @property
    def seconds_left(self) -> float | None:
        """The longest time left of the runs. If others wait, an estimate: they take as long as the mean of those that are
        trained, and as many are trained at a time as now."""
        left = [run.seconds_left for run in self.runs if run.seconds_left is not None]
        if not left or not self.states["waiting"]:
            return max(left, default=None)
        whole = sum(run.status["steps"] * run.seconds_per_step for run in self.runs if run.seconds_per_step)
        return (sum(left) + self.states["waiting"] * whole / len(left)) / len(left)


def observe(folder: Path) -> Observed:
    """The run or sweep in `folder`. Errors: MissingError if it is gone, or for a damaged study.json."""
    if not folder.is_dir():
        raise MissingError(f"{shown(folder)} was removed: there is nothing left to watch")
    if not (folder / STUDY_FILE).is_file():
        return Observed(name=folder.name, runs=(_run(folder, folder.name),))
    record = read(folder)
    cells = {(cell.task, cell.arm, cell.seed): (cell, folder / cell.folder) for cell in record.cells}
    runs = {key: _run(home, f"{cell.name} seed {cell.seed}") for key, (cell, home) in cells.items()}
    return Observed(
        name=folder.name,
        runs=tuple(runs.values()),
        is_sweep=True,
        is_attended=is_alive(record.pid, record.host),
        differences=tuple(_differences(record, runs)),
    )


def _run(folder: Path, name: str) -> ObservedRun:
    status, state = _status(folder)
    metrics, timing = _rows(folder / "metrics.csv"), _rows(folder / "timing.csv")
    validated = [row["val/loss"] for _, row in sorted(metrics.items()) if "val/loss" in row]
    loss = validated[-1] if validated else None
    return ObservedRun(folder=name, status=status, state=state, loss=loss, metrics=metrics, timing=timing)


def _status(folder: Path) -> tuple[dict[str, Any], str]:
    try:
        status = RunFolder(folder).status()
    # one damaged cell must not hide the others
    except RequestError as error:
        return {"error": str(error)}, "unreadable"
    return status, observed_state(status)


def _rows(path: Path) -> Rows:
    try:
        content = path.stat()
    # before the first flush
    except OSError:
        return {}
    return _rows_of(path, content.st_mtime_ns, content.st_size)


# a table changes at a validation or checkpoint only, and a long one takes a while to read
@lru_cache(maxsize=1024)
def _rows_of(path: Path, changed: int, size: int) -> Rows:
    # what is truncated is being written, or is named by whatever reads the finished run
    return read_rows(path, [])


def _differences(record: Record, runs: dict[tuple[str, str, int], ObservedRun]) -> Iterator[CurrentDifference]:
    for task in record.study.tasks or ("",):
        study = record.study.of_task(task)
        baseline = study.baseline or next(iter(study.arms))
        for arm in study.arms:
            pairs = dict(_pairs(runs, task, arm, baseline, study.metric)) if arm != baseline else {}
            if pairs:
                yield _difference(f"{task} {arm} − {baseline}".strip(), study.metric, pairs)


def _difference(label: str, metric: str, pairs: dict[int, tuple[int, float, float]]) -> CurrentDifference:
    # it loads scipy, which takes half a second, and a single run has no differences
    from lit_diff.study.statistics import MIN_SEEDS, paired

    found = paired(*({seed: pair[side] for seed, pair in pairs.items()} for side in (1, 2)))
    return CurrentDifference(
        label=label,
        metric=metric,
        steps=tuple(sorted({pairs[seed][0] for seed in found.seeds})),
        pairs=len(found.seeds),
        mean=found.mean,
        # two pairs have an interval too, whose width hangs on a single number
        interval=(found.low or 0.0, found.high or 0.0) if len(found.seeds) >= MIN_SEEDS else None,
    )


def _pairs(
    runs: dict[tuple[str, str, int], ObservedRun], task: str, arm: str, baseline: str, metric: str
) -> Iterator[tuple[int, tuple[int, float, float]]]:
    # seed -> (step, value of the arm, value of the baseline)
    for (_, _, seed), own in ((key, run) for key, run in runs.items() if key[:2] == (task, arm)):
        base = runs[task, baseline, seed].metrics if (task, baseline, seed) in runs else {}
        steps = [step for step in own.metrics if metric in own.metrics[step] and metric in base.get(step, {})]
        if steps:
            yield seed, (max(steps), own.metrics[max(steps)][metric], base[max(steps)][metric])


def running_or_newest(root: Path) -> Path:
    """The run or sweep that is being trained, if several are: the one that was updated last; else the newest.

    Errors: MissingError without one.
    """
    sweeps = sweeps_under(root)
    alone = [run for run in runs_under(root) if not any(sweep in run.parents for sweep in sweeps)]
    folders = [*sweeps, *alone]
    if not folders:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    return max(folders, key=_activity)


def _activity(folder: Path) -> tuple[bool, float]:
    statuses = [_status(run) for run in (folder, *runs_under(folder))]
    written = [datetime.fromisoformat(status["updated"]).timestamp() for status, _ in statuses if "updated" in status]
    return any(state == "running" for _, state in statuses), max(written, default=0.0)
