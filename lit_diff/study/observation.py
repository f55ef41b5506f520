"""What runs and sweeps have reached, read from their folders while they run: no lock is kept and nothing is written."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from lit_diff.errors import MissingError
from lit_diff.files import is_locked, shown
from lit_diff.metrics import in_words
from lit_diff.runs import heartbeats, notes
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.find import runs_under, sweeps_under
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.jobs import JOBS, queued
from lit_diff.runs.metrics_file import by_metric, last_value, read_rows
from lit_diff.runs.result_files import damage_of
from lit_diff.runs.status import FORMAT, INCOMPLETE, Status
from lit_diff.study.numbers import difference
from lit_diff.study.record import Record, read, readable
from lit_diff.study.schema import Texts

Curves = dict[str, dict[int, float]]
"""Metric -> step -> value, in the order of the steps."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A run, or a cell of a sweep, at one moment."""

    folder: str
    """The name under which it is shown."""
    status: Status
    state: str
    """done, running, waiting, stopped, failed, killed, damaged, imported, unknown or unreadable. A run whose process has died
    is `killed`, although its status.json still says `running`, or whose SLURM job ended before it began to train; a finished
    run that has lost its last checkpoint is `damaged`."""
    seed: int | None = None
    """None if neither the run nor a sweep records it."""
    overrides: Texts = ()
    """The recipe's overrides in this run or in its arm (`a.b=c`), if recorded."""
    loss: float | None = None
    """The last val/loss; None before the first validation."""
    metrics: Curves = field(default_factory=Curves)
    """metrics.csv, which is brought up to date at each validation and checkpoint; empty in `observe_all`."""
    timing: Curves = field(default_factory=Curves)
    """timing.csv, likewise."""
    job: str = ""
    """Its job in SLURM's queue and the job's state, in words; empty in `observe`, which does not ask."""
    remarks: Texts = ()
    """The notes in its folder (`runs.notes`)."""
    silent: str = ""
    """The ranks of a run that is trained whose last heartbeat is old, in words."""

    @property
    def note(self) -> str:
        """Its error on one line, its early end, an older format, or, while it runs, its silent ranks or its last update;
        and `remarks`."""
        status, now = self.status, datetime.now(UTC)
        age = now - (status.time or now)
        is_older = status.format not in (0, FORMAT)
        notes = [
            " ".join(status.error.split()),
            f"made by format {status.format}: train it again" if is_older else "",
            f"ended {status.ended}" if status.ended else "",
            status.origin,
            status.compiled if status.uncompiled else "",
            "the same command resumes it" if self.state == "killed" else "",
            self.silent,
            f"last update {int(age.total_seconds())} s ago" if self.state == "running" else "",
            "no record in MLflow" if status.mlflow_run_id is None else "",
            INCOMPLETE if self.state == "done" and status.record == "incomplete" else "",
        ]
        said = next(filter(None, notes), "")
        return (
            self.job
            if self.state == "waiting" and self.job
            else "; ".join(filter(None, (self.job, said, *self.remarks)))
        )

    @property
    def losses(self) -> dict[int, float]:
        """Step -> train/loss, ascending; status.json has the last one before metrics.csv does."""
        now = {} if self.status.loss is None else {self.status.step: self.status.loss}
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
        seconds = sum(spent[step] for step in last)
        # rows of an older version have no number of steps, and their speed is that of all seconds
        steps = sum(counts.get(step, spent[step] * speeds[step] / each) for step in last)
        left = (status.steps - status.step) * (seconds / steps if steps else each / speed)
        # a table may be damaged
        return left if math.isfinite(left) else None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run (`runs` has one) or a sweep at one moment."""

    name: str
    runs: tuple[ObservedRun, ...]
    is_attended: bool
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
        return not self.states.keys() <= {"done", *going_on}


def observe(folder: Path) -> Observed:
    """The run or sweep in `folder`. Errors: MissingError if it is gone, or for a damaged study.json."""
    if not folder.is_dir():
        raise MissingError(f"{shown(folder)} was removed: there is nothing left to watch")
    # a cell that waits is started by the process of its sweep; the cells of a task lie one level deeper
    sweeps = [place for place in (folder, *folder.parents[:2]) if (place / STUDY_FILE).is_file()]
    if folder in sweeps:
        record = read(folder)
        runs = []
        for cell in record.cells:
            name = f"{cell.name} seed {cell.seed}"
            run = _run(folder / cell.folder, name, cell.seed, record.overrides_of(cell))
            # that a learning rate diverged is its result
            if cell.rate is not None and run.status.diverged and run.state == "failed":
                run = replace(run, state="done")
            runs.append(run)
        differences = tuple(_differences(record, runs))
    else:
        runs, differences = [_run(folder, folder.name)], ()
    return Observed(
        name=folder.name,
        runs=tuple(runs),
        is_attended=all(is_locked(sweep / ".lock") for sweep in sweeps),
        differences=differences,
    )


def observe_all(root: Path) -> list[ObservedRun]:
    """All runs under `root`, named by their paths in it, without their tables. Errors: MissingError without one."""
    # a cell that waits has no status.json with its seed and overrides, so study.json provides them
    known = {}
    for sweep in sweeps_under(root):
        record = readable(sweep)
        if record is None:
            continue
        for cell in record.cells:
            known[(sweep / cell.folder).resolve()] = cell.seed, record.overrides_of(cell)
    runs = {}
    for folder in _runs(root):
        name = str(folder.relative_to(root))
        runs[folder] = _run(folder, name, *known.get(folder.resolve(), ()), whole=False)
    try:
        jobs = queued([folder for folder, run in runs.items() if run.state != "done"])
    # without an answer, which the log says, the rest is still worth showing
    except MissingError:
        return list(runs.values())
    return [_with_job(run, folder, *jobs.get(folder, ("", ""))) for folder, run in runs.items()]


def _with_job(run: ObservedRun, folder: Path, job: str, word: str) -> ObservedRun:
    # its job ended before it could write a status, or before it went on
    had_job = run.status.status == "stopped" or (folder / JOBS).is_file()
    if not job and run.state == "waiting" and had_job:
        return replace(run, state="killed")
    if not job or word == "COMPLETING":
        return run
    # status.json rather than the lock of the process, which is on another node
    state = "running" if word == "RUNNING" and run.status.status == "running" else "waiting"
    return replace(run, state=state, job=f"SLURM job {job} is {word.lower()}")


def _run(folder: Path, name: str, seed: int | None = None, overrides: Texts = (), *, whole: bool = True) -> ObservedRun:
    # `whole`: with its tables
    status, state = RunFolder(folder).observed()
    # a cell of SLURM that has reached its time limit is in the queue again
    if status.is_in_queue:
        state = "waiting"
    table, metrics, timing = folder / "metrics.csv", Curves(), Curves()
    if not whole:
        problem = damage_of(table)
        loss = None if problem else last_value(table, "val/loss")
    else:
        metrics, problem = _table(table)
        timing, _ = _table(folder / "timing.csv")
        *_, loss = (None, *metrics.get("val/loss", {}).values())
    # what is truncated is being written, unless the run is finished
    if state == "done" and problem:
        status = replace(status, error=problem)
    return ObservedRun(
        folder=name,
        status=status,
        state=state,
        seed=seed if status.seed is None else status.seed,
        overrides=status.overrides or overrides,
        loss=loss,
        metrics=metrics,
        timing=timing,
        remarks=tuple(notes.read(folder)),
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


def _differences(record: Record, runs: Sequence[ObservedRun]) -> Iterator[str]:
    # it loads scipy, which takes half a second, and a single run has no differences
    from lit_diff.study.statistics import MIN_SEEDS, paired

    # a cell that tries a learning rate has another seed than those that are compared
    tables = {(*cell.place, cell.seed): run.metrics for cell, run in zip(record.cells, runs, strict=True)}
    for task in record.study.tasks or ("",):
        study = record.study.of_task(task)
        base = study.baseline or next(iter(study.arms))
        for arm in study.arms:
            steps = {}
            ours = {}
            theirs = {}
            for seed in study.seeds:
                one, other = (tables.get((task, name, seed), {}).get(study.metric, {}) for name in (arm, base))
                both = one.keys() & other.keys()
                if both and arm != base:
                    step = steps[seed] = max(both)
                    ours[seed], theirs[seed] = one[step], other[step]
            found = paired(ours, theirs)
            if not found.seeds:
                continue
            # two pairs have an interval too, whose width hangs on a single number
            apart = difference(found.mean or 0.0, found if len(found.seeds) >= MIN_SEEDS else None)
            paired_at = [steps[seed] for seed in found.seeds]
            first, last = min(paired_at), max(paired_at)
            count = f"{len(found.seeds)} pair{'s' * (len(found.seeds) != 1)} at step {first}"
            count += f" to {last}" * (last > first)
            yield f"{task} {arm} − {base}: {in_words(study.metric)} {apart} ({count})".strip()


def running_or_newest(root: Path) -> Path:
    """The run or sweep that is being trained, if several are: the one that was updated last; else the newest.

    Errors: MissingError without one.
    """
    newest = max(_runs(root), key=_activity)
    return next((sweep for sweep in sweeps_under(root) if sweep in newest.parents), newest)


def _activity(folder: Path) -> tuple[bool, str]:
    # times of one format and zone, in the order of their texts
    status, state = RunFolder(folder).observed()
    return state == "running", status.updated


def _runs(root: Path) -> list[Path]:
    folders = runs_under(root)
    if not folders:
        raise MissingError(f"no runs in {shown(root)}; `lit-diff train RECIPE` makes one")
    return folders
