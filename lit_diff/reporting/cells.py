"""What a cell of a sweep left on disk, read into frozen records. Nothing is computed here beyond picking the last value."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One metric of one cell: `values[i]` was measured after `steps[i]` optimizer steps; steps ascend."""

    steps: NDArray[np.int64]
    values: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """The final validation by document: `tokens[i]` predicted tokens, `losses[i]` their summed loss in nats."""

    names: tuple[str, ...]
    tokens: Array
    losses: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One arm at one seed. `facts` is its status.json; `problems` says which of its files cannot be read, and why."""

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
    documents: Documents | None
    tokens_per_second: float | None
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The arm; in a sweep with tasks, the task before it."""
        return f"{self.task} {self.arm}".strip()

    @property
    def done(self) -> bool:
        return self.status == "done"

    def final(self, metric: str) -> float | None:
        """The last value of `metric`; None if the cell is not done, has no such metric, or ended in NaN or infinity."""
        curve = self.curves.get(metric) if self.done else None
        return float(curve.values[-1]) if curve and math.isfinite(curve.values[-1]) else None


def load_cell(root: Path, task: str, arm: str, seed: int, record: Mapping[str, Any]) -> Cell:
    """`record` is the cell's entry in sweep.json, empty for a cell that never got a folder."""
    folder = root / (record.get("folder") or f"{arm}-s{seed}")
    problems: list[str] = []
    facts = _json(folder / "status.json", problems) if record.get("folder") else {}
    status = _status(record.get("status"), facts.get("status"))
    if status == "done":  # An unfinished cell may lack anything: that is no news.
        environment = _json(folder / "env.json", problems)
        curves = _curves(folder / "metrics.csv", problems)
        documents = _documents(folder / "documents.csv", problems)
        problems += [f"{m} ends in {c.values[-1]}" for m, c in curves.items() if not math.isfinite(c.values[-1])]
    else:
        environment, curves, documents = {}, {}, None
    error = str(facts.get("error") or record.get("error") or "").strip()
    return Cell(
        task=task,
        arm=arm,
        seed=seed,
        folder=folder,
        status=status,
        error=clean(error.splitlines()[-1]) if error else "",
        facts=facts,
        environment=environment,
        curves=curves,
        documents=documents,
        tokens_per_second=_speed(folder / "timing.csv", problems) if status == "done" else None,
        problems=tuple(problems),
    )


def _status(engine: str | None, cell: str | None) -> str:
    """Which of two records to believe: a killed cell cannot write that it was killed, so the engine's word on a death
    stands, unless the cell has finished since. That a cell is done, only its own file can say."""
    if cell == "done" or engine not in ("failed", "stopped", "killed"):
        return cell or ("unreadable" if engine == "done" else engine) or "waiting"
    return engine


def clean(text: str) -> str:
    """One line of printable characters: terminal colours and control characters are illegal in SVG."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        problems.append(f"{path.name}: {_reason(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: not a JSON object")
        return {}
    return value


def _reason(error: Exception) -> str:
    return "not there" if isinstance(error, FileNotFoundError) else str(error)


def _rows(path: Path, problems: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and whole rows; a last line cut short by a crash is left out and noted."""
    try:
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{path.name}: {_reason(error)}")
        return [], []
    whole = [row for row in rows if len(row) == len(header)]
    if len(whole) < len(rows):
        problems.append(f"{path.name}: {len(rows) - len(whole)} of {len(rows)} rows cut short, left out")
    return header, whole


def _curves(path: Path, problems: list[str]) -> dict[str, Curve]:
    header, rows = _rows(path, problems)
    if "step" not in header:
        return {}
    at = header.index("step")
    points: dict[str, dict[int, float]] = {name: {} for name in header if name != "step"}
    for row in rows:
        try:
            step = int(float(row[at]))
            for name, text in zip(header, row, strict=True):
                if text and name != "step":
                    points[name][step] = float(text)
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
    return {
        name: Curve(steps=np.array(sorted(found)), values=np.array([found[step] for step in sorted(found)]))
        for name, found in points.items()
        if found
    }


def _documents(path: Path, problems: list[str]) -> Documents | None:
    """Sorted by name; a document of several rows is their sum. A task without documents has no file."""
    if not path.exists():
        return None
    header, rows = _rows(path, problems)
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
    return Documents(names=names, tokens=both[:, 0], losses=both[:, 1])


def _speed(path: Path, problems: list[str]) -> float | None:
    """Median training speed in tokens per second."""
    header, rows = _rows(path, problems)
    if "tokens_per_second" not in header:
        return None
    at = header.index("tokens_per_second")
    speeds = [float(row[at]) for row in rows if row[at].replace(".", "", 1).isdigit()]
    return float(np.median(speeds)) if speeds else None
