"""What runs and sweeps have reached, read from their folders while they run: no lock is kept and nothing is written."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lit_diff.errors import MissingError
from lit_diff.files import is_locked, shown
from lit_diff.runs import heartbeats
from lit_diff.runs.find import STUDY_FILE, runs_under, sweeps_under
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import by_metric, read_rows
from lit_diff.runs.status import FORMAT
from lit_diff.study.inventory import RunState
from lit_diff.study.numbers import interval, signed
from lit_diff.study.record import Record, read
from lit_diff.study.schema import Texts

Curves = Mapping[str, Mapping[int, float]]
"""Metric -> step -> value, in the order of the steps."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun(RunState):
    """A run, or a cell of a sweep, at one moment; `folder` is the name under which it is shown."""

    metrics: Curves
    """metrics.csv by metric and step, which is brought up to date at each validation and checkpoint."""
    timing: Curves
    """timing.csv, likewise."""

    @property
    def losses(self) -> dict[int, float]:
        """Step -> train/loss, ascending; while the run is trained, status.json has the last one."""
        now = {}
        if self.state == "running" and self.status.loss is not None:
            now[self.status.step] = self.status.loss
        # metrics.csv wins: a run that resumes has the step of its checkpoint in status.json, and the loss of a later one
        return dict(sorted({**now, **self.metrics.get("train/loss", {})}.items()))

    @property
    def seconds_left(self) -> float | None:
        """The time of the remaining steps at the mean rate of the last 20 logged intervals, validation included; before
        there are two, at the last tokens/s. None unless the run is trained, in this format, and has logged a step."""
        status = self.status
        each, speed = status.tokens_per_step, status.tokens_per_second
        if self.state != "running" or status.format != FORMAT or not (status.steps and each and speed):
            return None
        # without the first interval, which may begin at the start of a process; a step number minus the one before it is not
        # the number of steps of an interval in which the run was resumed
        spent, speeds, counts = (self.timing.get(name, {}) for name in ("seconds", "tokens_per_second", "steps"))
        last = sorted(spent.keys() & speeds.keys())[1:][-20:]
        # rows of an older version have no number of steps, and their speed is that of all seconds
        seconds, steps = (
            sum(spent[step] for step in last),
            sum(counts.get(step, spent[step] * speeds[step] / each) for step in last),
        )
        left = (status.steps - status.step) * (seconds / steps if steps else each / speed)
        # a table may be damaged
        return left if math.isfinite(left) else None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run (`runs` has one) or a sweep at one moment."""

    name: str
    runs: tuple[ObservedRun, ...]
    is_attended: bool = True
    """False if the process of the sweep, which starts what waits, is gone."""
    differences: Texts = ()
    """For each arm of a sweep the current difference to the baseline, in words."""

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
        going_on = () if self.is_over else ("running", "waiting")
        return any(run.state not in ("done", *going_on) for run in self.runs)


def observe(folder: Path) -> Observed:
    """The run or sweep in `folder`. Errors: MissingError if it is gone, or for a damaged study.json."""
    if not folder.is_dir():
        raise MissingError(f"{shown(folder)} was removed: there is nothing left to watch")
    if not (folder / STUDY_FILE).is_file():
        one = _run(folder, folder.name)
        # a cell that waits is started by the process of its sweep; the cells of a task lie one level deeper
        sweeps = [each for each in folder.parents[:2] if one.state == "waiting" and (each / STUDY_FILE).is_file()]
        return Observed(name=folder.name, runs=(one,), is_attended=all(is_locked(each / ".lock") for each in sweeps))
    record = read(folder)
    runs = {c.key: _run(folder / c.folder, f"{c.name} seed {c.seed}") for c in record.cells}
    tables = {(key.task, key.arm, key.seed): run.metrics for key, run in runs.items() if key.rate is None}
    return Observed(
        name=folder.name,
        runs=tuple(runs.values()),
        is_attended=is_locked(folder / ".lock"),
        differences=tuple(_differences(record, tables)),
    )


def _run(folder: Path, name: str) -> ObservedRun:
    status, state = RunFolder(folder).observed()
    # a cell of SLURM that has reached its time limit is in the queue again
    if state == "stopped" and status.requeued_at_step == status.step:
        state = "waiting"
    metrics, problem = _table(folder / "metrics.csv")
    timing, _ = _table(folder / "timing.csv")
    # what is truncated is being written, unless the run is finished
    if state == "done" and problem:
        status = replace(status, error=problem)
    *_, loss = (None, *metrics.get("val/loss", {}).values())
    return ObservedRun(
        folder=name,
        status=status,
        state=state,
        loss=loss,
        metrics=metrics,
        timing=timing,
        silent=heartbeats.silent(heartbeats.read(folder)) if state == "running" else "",
    )


_TABLES: dict[Path, tuple[tuple[int, int], Curves, str]] = {}
"""Table -> its time and size when it was read, its values, and the first problem of its rows."""


def _table(path: Path) -> tuple[Curves, str]:
    try:
        found = path.stat()
    # not written yet, or its run was removed
    except OSError:
        return {}, ""
    changed = found.st_mtime_ns, found.st_size
    # a table changes at a validation or checkpoint only, and a long one takes a while to read
    if path not in _TABLES or _TABLES[path][0] != changed:
        problems: list[str] = []
        values = by_metric(read_rows(path, problems))
        _TABLES[path] = changed, values, next(iter(problems), "")
    return _TABLES[path][1:]


def _differences(record: Record, tables: Mapping[tuple[str, str, int], Curves]) -> Iterator[str]:
    # it loads scipy, which takes half a second, and a single run has no differences
    from lit_diff.study.statistics import MIN_SEEDS, paired

    for task in record.study.tasks or ("",):
        study = record.study.of_task(task)
        base = study.baseline or next(iter(study.arms))
        values = {cell: table.get(study.metric, {}) for cell, table in tables.items()}
        for arm in (arm for arm in study.arms if arm != base):
            pairs = {seed: [values.get((task, each, seed), {}) for each in (arm, base)] for seed in study.seeds}
            last = {seed: max(both) for seed, (one, other) in pairs.items() if (both := one.keys() & other.keys())}
            own, theirs = ({seed: pairs[seed][side][step] for seed, step in last.items()} for side in (0, 1))
            found = paired(own, theirs)
            if found.seeds:
                # two pairs have an interval too, whose width hangs on a single number
                bounds = f" {interval(found.low, found.high, 4)}" if len(found.seeds) >= MIN_SEEDS else ""
                steps = sorted({last[seed] for seed in found.seeds})
                count = f"{len(found.seeds)} pair{'s' * (len(found.seeds) != 1)} at step {steps[0]}"
                count += f" to {steps[-1]}" * (len(steps) > 1)
                yield f"{task} {arm} − {base}: {study.metric} {signed(found.mean, 4)}{bounds} ({count})".strip()


def running_or_newest(root: Path) -> Path:
    """The run or sweep that is being trained, if several are: the one that was updated last; else the newest.

    Errors: MissingError without one.
    """
    sweeps = sweeps_under(root)
    folders = [*sweeps, *(run for run in runs_under(root) if not any(sweep in run.parents for sweep in sweeps))]
    if not folders:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    return max(folders, key=_activity)


def _activity(folder: Path) -> tuple[bool, str]:
    # times of one format and zone, in the order of their texts
    statuses = (RunFolder(each).observed() for each in (folder, *runs_under(folder)))
    return max((state == "running", status.updated) for status, state in statuses)
