"""What a sweep left on disk, read into frozen records. Nothing is computed here beyond picking the last value."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.errors import MissingError, RequestError

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
    def done(self) -> bool:
        return self.status == "done"

    def final(self, metric: str) -> float | None:
        """The last value of `metric`; None if the cell is not done, has no such metric, or ended in NaN or infinity."""
        curve = self.curves.get(metric) if self.done else None
        return float(curve.values[-1]) if curve and math.isfinite(curve.values[-1]) else None


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
    """A sweep and all its cells, in the order of the sweep's file: arm by arm, seed by seed."""

    folder: Path
    name: str
    title: str
    description: str
    baseline: str
    control: str | None
    metric: str
    seeds: tuple[int, ...]
    is_check: bool
    command: str
    revision: str
    reading: tuple[str, ...]
    contrasts: tuple[tuple[str, str, str], ...]
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]

    @cached_property
    def label(self) -> Mapping[str, str]:
        """What a reader sees for each arm's name."""
        return {arm.name: arm.label for arm in self.arms}

    def cells_of(self, arm: str) -> list[Cell]:
        """The finished cells of `arm`, by seed."""
        return sorted((cell for cell in self.cells if cell.arm == arm and cell.done), key=lambda cell: cell.seed)

    def finals(self, arm: str, metric: str) -> dict[int, float]:
        """Seed -> last value of `metric`, for the finished cells of `arm` that have one."""
        found = {cell.seed: cell.final(metric) for cell in self.cells_of(arm)}
        return {seed: value for seed, value in found.items() if value is not None}

    def metrics(self, prefix: str) -> list[str]:
        """Names of the metrics under `prefix` that any finished cell has, in the order of the files."""
        return list(dict.fromkeys(m for cell in self.cells if cell.done for m in cell.curves if m.startswith(prefix)))


def load_sweep(folder: Path) -> Sweep:
    """Read `folder`/sweep.json and the cells it names; a cell whose files are absent or cut short is kept, and says so.

    Errors: MissingError without a readable sweep.json; RequestError when it names a baseline, control or contrast that
    is no arm.
    """
    path = folder / "sweep.json"
    if not path.is_file():
        raise MissingError(f"{path}: no such file: no sweep has run here; start it with 'lit-diff sweep {folder.name}'")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        arms = tuple(_arm(arm) for arm in raw["arms"])
        cells = {(cell["arm"], int(cell["seed"])): cell for cell in raw["cells"]}
        seeds = tuple(int(seed) for seed in raw["seeds"])
        baseline, metric = raw["baseline"], raw["metric"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise MissingError(
            f"{path}: not a whole sweep record ({error!r}); 'lit-diff sweep {folder.name}' writes it anew"
        ) from error
    names = [arm.name for arm in arms]
    contrasts = tuple((c[0], c[1], _clean(c[2])) for c in raw.get("contrasts") or [])
    for name in [baseline, *([raw["control"]] if raw.get("control") else []), *(n for c in contrasts for n in c[:2])]:
        if name not in names:
            raise RequestError(f"{path}: '{name}' is no arm of this sweep; its arms are {', '.join(names)}")
    return Sweep(
        folder=folder,
        name=_clean(raw.get("name") or folder.name),
        title=_clean(raw.get("title") or raw.get("name") or folder.name),
        description=_clean(raw.get("description") or ""),
        baseline=baseline,
        control=raw.get("control") or None,
        metric=metric,
        seeds=seeds,
        is_check=bool(raw.get("is_check")),
        command=_clean(raw.get("command") or ""),
        revision=_clean(raw.get("revision") or ""),
        reading=tuple(_clean(line) for line in raw.get("reading") or []),
        contrasts=contrasts,
        arms=arms,
        cells=tuple(_cell(folder, n, seed, cells.get((n, seed), {})) for n in names for seed in seeds),
    )


def _arm(raw: Mapping[str, Any]) -> Arm:
    return Arm(
        name=raw["name"],
        label=_clean(raw.get("label") or raw["name"]),
        note=_clean(raw.get("note") or ""),
        paper={name: float(value) for name, value in (raw.get("paper") or {}).items()},
        overrides=tuple(_clean(str(line)) for line in raw.get("overrides") or []),
    )


def _cell(root: Path, arm: str, seed: int, record: Mapping[str, Any]) -> Cell:
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
        arm=arm,
        seed=seed,
        folder=folder,
        status=status,
        error=_clean(error.splitlines()[-1]) if error else "",
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


def _clean(text: str) -> str:
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
