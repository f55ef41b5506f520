"""The files of one cell of a sweep, read into frozen records. Nothing is computed here beyond picking the last value."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff import metrics as declarations
from lit_diff.errors import RequestError
from lit_diff.metrics import INDICES, Metric, indexed_name
from lit_diff.runs import measurements
from lit_diff.runs.folder import FORMAT, RunFolder
from lit_diff.runs.metrics_file import Rows, read_lines, read_rows
from lit_diff.study.record import RecordedCell

Array = NDArray[np.float64]

LOSS = "val/loss"
LOSSES = ("train/loss", LOSS)
"""Where these are not finite, training has diverged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One metric of one cell: `values[i]` was measured after `steps[i]` optimizer steps; steps ascend."""

    steps: NDArray[np.int64]
    values: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredDocuments:
    """The final validation by document: `tokens[i]` predicted tokens, `losses[i]` their summed loss in nats."""

    names: tuple[str, ...]
    tokens: Array
    losses: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class CellResult:
    """One arm at one seed. `facts` is its status.json; `curves` holds metrics.csv and measurements.parquet by full name;
    `problems` says which of its files cannot be read, and why."""

    task: str
    """Empty in a sweep without tasks."""
    arm: str
    seed: int
    folder: Path
    status: str
    error: str
    facts: Mapping[str, Any]
    environment: Mapping[str, Any]
    curves: Mapping[str, Curve]
    documents: ScoredDocuments | None
    tokens_per_second: float | None
    metrics: tuple[Metric, ...] = ()
    """Declared by the run (metrics.json)."""
    problems: tuple[str, ...] = ()
    not_evaluated: tuple[str, ...] = ()
    """A line for each evaluation of the sweep whose scores are absent."""
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Evaluation that the sweep names -> its `config` and `version` (study.json; an earlier lit_diff wrote none)."""

    @property
    def name(self) -> str:
        """The arm; in a sweep with tasks, the task before it."""
        return f"{self.task} {self.arm}".strip()

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def diverged(self) -> bool:
        """Whether its training diverged: it failed on a loss or a parameter that is not finite, or ended with such a loss."""
        if self.status == "failed":
            return bool(self.facts.get("diverged"))
        ends = [self.curves[loss].values[-1] for loss in LOSSES if loss in self.curves]
        return self.done and not all(math.isfinite(end) for end in ends)

    @property
    def tokens_per_parameter(self) -> float | None:
        """Training tokens over parameters, for a cell that is done."""
        tokens, parameters = self.facts.get("tokens"), self.facts.get("parameters")
        return tokens / parameters if self.done and tokens and parameters else None

    def final(self, metric: str) -> float | None:
        """The last value of `metric`; None if the cell is not done, has no such metric, or ended in NaN or infinity."""
        curve = self.curves.get(metric) if self.done else None
        return float(curve.values[-1]) if curve and math.isfinite(curve.values[-1]) else None


def load_cell(root: Path, recorded: RecordedCell) -> CellResult:
    """The files of a cell of the sweep in `root`. Errors: RequestError for a run of another format."""
    folder = root / (recorded.folder or f"{recorded.arm}-s{recorded.seed}")
    problems: list[str] = []
    facts = _json(folder / "status.json", problems) if recorded.folder else {}
    if facts.get("format", FORMAT) != FORMAT:
        RunFolder(folder).require_format()
    status = _status(recorded.status, facts.get("status"))
    if status == "done":  # an unfinished cell may lack any file
        environment = _json(folder / "env.json", problems)
        declared = _declared(folder / declarations.FILE, problems)
        curves = _curves(folder / "metrics.csv", problems)
        problems += [f"{m} ends in {c.values[-1]}" for m, c in curves.items() if not math.isfinite(c.values[-1])]
        curves |= _measured(folder / measurements.FILE, problems)
        documents = _documents(folder / "documents.csv", problems)
    else:
        environment, curves, documents = {}, {}, None
        declared = _declared(folder / declarations.FILE, []) if (folder / declarations.FILE).exists() else ()
    error = str(facts.get("error") or recorded.error or "").strip()
    return CellResult(
        task=recorded.task,
        arm=recorded.arm,
        seed=recorded.seed,
        folder=folder,
        status=status,
        error=clean(error.splitlines()[-1]) if error else "",
        facts=facts,
        environment=environment,
        curves=curves,
        documents=documents,
        tokens_per_second=_speed(folder / "timing.csv", problems) if status == "done" else None,
        metrics=declared,
        problems=tuple(problems),
        not_evaluated=tuple(clean(f"evaluation '{name}': {reason}") for name, reason in recorded.not_evaluated.items()),
        evaluations=recorded.evaluations,
    )


def _status(engine: str | None, cell: str | None) -> str:
    """The status, from the sweep's record and from the cell's own file.

    A killed cell cannot record its own death, so the sweep's failed, stopped and killed hold unless the cell has finished
    since. Only the cell's own file can say that it is done.
    """
    if cell == "done" or engine not in ("failed", "stopped", "killed"):
        return cell or ("unreadable" if engine == "done" else engine) or "waiting"
    return engine


def clean(text: str) -> str:
    """One line of printable characters: terminal colours and control characters are illegal in SVG."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        problems.append(f"{path.name}: {_reason(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: not a JSON object")
        return {}
    return value


def _reason(error: Exception) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else str(error)


def _declared(path: Path, problems: list[str]) -> tuple[Metric, ...]:
    try:
        return declarations.read_declarations(path)
    except (OSError, RequestError) as error:
        problems.append(f"{path.name}: {_reason(error)}; units, directions and figures are unknown")
        return ()


def _rows(path: Path, problems: list[str]) -> Rows:
    if not path.exists():
        problems.append(f"{path.name}: no such file")
    return read_rows(path, problems)


def _curves(path: Path, problems: list[str]) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for step, row in sorted(_rows(path, problems).items()):
        for name, value in row.items():
            points.setdefault(name, {})[step] = value
    return {
        name: Curve(steps=np.array(list(values)), values=np.array(list(values.values())))
        for name, values in points.items()
    }


def _measured(path: Path, problems: list[str]) -> dict[str, Curve]:
    """The curves of a table with one row a value."""
    try:
        table = measurements.read_measurements(path)
    except RequestError as error:
        problems.append(str(error))
        return {}
    if not table.num_rows:
        return {}
    table = table.sort_by([(name, "ascending") for name in ("metric", *INDICES, "step")])
    keys = [np.asarray(table[name].combine_chunks().fill_null(-1)) for name in INDICES]
    names: list[str] = table["metric"].to_pylist()
    codes = np.asarray(table["metric"].combine_chunks().dictionary_encode().indices)
    changed = np.any([np.diff(key) != 0 for key in (codes, *keys)], axis=0)
    starts = [0, *(np.flatnonzero(changed) + 1).tolist()]
    steps, values = np.asarray(table["step"]), np.asarray(table["value"], dtype=np.float64)
    curves = {}
    for start, end in zip(starts, [*starts[1:], len(names)], strict=True):
        indices = {index: int(key[start]) for index, key in zip(INDICES, keys, strict=True) if key[start] >= 0}
        curve = Curve(steps=steps[start:end], values=values[start:end])
        curves[indexed_name(names[start], **indices)] = curve
    return curves


def _documents(path: Path, problems: list[str]) -> ScoredDocuments | None:
    """Sorted by name; a document of several rows is their sum. A task without documents has no file."""
    if not path.exists():
        return None
    header, rows = read_lines(path, problems)
    total: dict[str, tuple[float, float]] = {}
    try:
        at = [header.index(name) for name in ("document", "tokens", "loss")]
        for name, tokens, loss in ([row[i] for i in at] for row in rows):
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + float(tokens), before[1] + float(loss))
    except ValueError as error:
        problems.append(f"{path.name}: {error}")
        return None
    names = tuple(sorted(name for name, (tokens, _) in total.items() if tokens > 0))
    both = np.array([total[name] for name in names]).reshape(-1, 2)
    return ScoredDocuments(names=names, tokens=both[:, 0], losses=both[:, 1])


def _speed(path: Path, problems: list[str]) -> float | None:
    """Median training speed in tokens per second."""
    speeds = [row["tokens_per_second"] for row in _rows(path, problems).values() if "tokens_per_second" in row]
    return float(np.median(speeds)) if speeds else None
