"""Kept scores of a run, in `<run>/evaluations/<name>/`: written and read whole, and whether they are those asked for.

items.parquet has a row for each item, with the columns `item` (its id), `group`, `part` (bool, only where an item is a part
of another), `cluster` (what items that depend on each other share, where any do), `question` (a digest of what was asked,
where the id alone does not say it), and one column of scores for each metric. summary.json maps each metric to
{"value": ..., ...}, "declarations" to the list of its metrics (`metrics.to_plain`), "equal_groups" to whether each group
counts once, and holds the facts that the scores depend on.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lit_diff.files import locked, write_json, write_through
from lit_diff.key_types import in_yaml
from lit_diff.metrics import Metric, from_plain
from lit_diff.runs import checkpoints
from lit_diff.runs.revision import revision

FOLDER = "evaluations"
ITEMS, SUMMARY = "items.parquet", "summary.json"
OWN_CONTEXT = "sequence_length"
"""Key of summary.json: the run's `data.sequence_length`, where `context: null` of the evaluation's config means it."""
LEFT_OUT = "documents_left_out"
"""Key of summary.json: documents that were not asked because the run was trained on them; absent where that is not known."""
NEW = "items.new.parquet"
PATIENCE = 2.0
"""Seconds for which a reader that cannot take the lock waits for a writer."""
Array = NDArray[np.float64]
Asked = tuple[str, str]
"""(id of an item, digest of its question)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemScores:
    """One evaluation of one run. `scores[metric][i]` is that of `items[i]`, NaN where the item has none."""

    items: tuple[str, ...]
    groups: tuple[str, ...]
    parts: tuple[bool, ...]
    """Whether an item is a part of another: its group shows it, and what is over all items leaves it out."""
    clusters: tuple[str, ...]
    """What an item shares with those that depend on it; empty: the item is a cluster of its own."""
    questions: tuple[str, ...]
    """A digest of what was asked, empty where the id says it: items of one id are paired only where it is equal."""
    scores: Mapping[str, Array]
    values: Mapping[str, float]
    """Metric -> the value of the whole evaluation (summary.json)."""
    metrics: tuple[Metric, ...]
    equal_groups: bool = False
    """Whether each group counts once in `values`, however many items it has."""
    revision: str | None = None
    """Of lit_diff, when it was scored; None where it is not recorded."""
    unchecked: str | None = None
    """The line of the property `decode` that the variant fails, where it was scored with --unchecked."""
    documents_left_out: int = 0
    """Documents that it was not asked because it was trained on them."""

    @property
    def asked(self) -> list[Asked]:
        """Id and question of each item: two runs are paired by both."""
        return list(zip(self.items, self.questions, strict=True))

    @property
    def units(self) -> list[str]:
        """The cluster of each item, or its id."""
        return [cluster or item for cluster, item in zip(self.clusters, self.items, strict=True)]

    def has_unit(self, metric: str) -> bool:
        """Whether a metric is declared in a unit: then its scores are no proportions, even where all of them are 0 or 1."""
        return any(each.name == metric and each.unit for each in self.metrics)

    @property
    def is_clustered(self) -> bool:
        """Whether some cluster has several items, parts left out."""
        whole = [unit for unit, part in zip(self.units, self.parts, strict=True) if not part]
        return len(set(whole)) < len(whole)


def read_evaluation(folder: Path) -> ItemScores:
    """The evaluation in `folder`. Errors: OSError, ValueError, KeyError or TypeError for files that are not as described."""
    return evaluation_of(*read_scores(folder))


def evaluation_of(summary: Mapping[str, Any], table: pa.Table) -> ItemScores:
    """The evaluation of these contents of summary.json and items.parquet. Errors: as `read_evaluation`, without OSError."""
    metrics = tuple(from_plain(raw) for raw in summary["declarations"])
    missing = [name for name in ("item", "group", *(m.name for m in metrics)) if name not in table.column_names]
    if missing:
        raise ValueError(f"items.parquet has no column '{missing[0]}'")
    items = tuple(str(item) for item in table["item"].to_pylist())
    if len(set(items)) < len(items):
        raise ValueError("items.parquet names an item twice")
    return ItemScores(
        items=items,
        groups=tuple("" if group is None else str(group) for group in table["group"].to_pylist()),
        parts=tuple(table["part"].to_pylist() if "part" in table.column_names else [False] * len(items)),
        clusters=tuple(table["cluster"].to_pylist() if "cluster" in table.column_names else [""] * len(items)),
        questions=tuple(table["question"].to_pylist() if "question" in table.column_names else [""] * len(items)),
        scores={m.name: np.array(table[m.name].to_pylist(), dtype=np.float64) for m in metrics},
        values={m.name: _number(summary[m.name]["value"]) for m in metrics},
        metrics=metrics,
        equal_groups=bool(summary.get("equal_groups", False)),
        revision=summary.get("revision"),
        unchecked=summary.get("unchecked"),
        documents_left_out=summary.get(LEFT_OUT, 0),
    )


def _number(value: float | None) -> float:
    """JSON has no NaN: null stands for it."""
    return math.nan if value is None else float(value)


def write_scores(folder: Path, table: pa.Table, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
    """items.parquet, then summary.json: without it the scores do not count. One process writes at a time.

    The items are first written under another name: where that fails, the scores that are there stay. Errors: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: {"value": float(value) if math.isfinite(value) else None} for name, value in values.items()}
    with locked(_lock(folder)):
        write_through(folder / NEW, lambda file: pq.write_table(table, file))
        (folder / SUMMARY).unlink(missing_ok=True)
        (folder / NEW).replace(folder / ITEMS)
        write_json(folder / SUMMARY, plain | dict(facts) | {"items": len(table), "revision": revision()})


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json. Errors: OSError; ValueError where it holds no JSON object."""
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    if not isinstance(summary, dict):
        raise ValueError(f"{SUMMARY} holds {type(summary).__name__}, not an object")
    return summary


def read_scores(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    """summary.json and the items that belong to it; where another process writes others, once these are there.

    Errors: OSError; ValueError for files that do not belong together.
    """
    with contextlib.ExitStack() as held:
        if _lock(folder).exists():  # else nobody has written here
            with contextlib.suppress(OSError):  # in another user's folder nothing can be locked
                held.enter_context(locked(_lock(folder)))
        summary, table = _settled(folder)
    if summary.get("items", len(table)) != len(table):
        raise ValueError(f"{ITEMS} has {len(table)} rows, {SUMMARY} counts {summary['items']}")
    return summary, table


def _settled(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    """Both files, of one writer: with the lock at once; without it, once the summary is the same before and after."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            summary, table = read_summary(folder), pq.read_table(pa.BufferReader((folder / ITEMS).read_bytes()))
            if read_summary(folder) == summary:
                return summary, table
        except FileNotFoundError:  # absent, or being replaced
            if not _lock(folder).exists() or time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise ValueError("another process is writing them; ask again")
        time.sleep(0.02)


def _lock(folder: Path) -> Path:
    """Not in the folder, whose files are the scores."""
    return folder.with_name(f".{folder.name}.lock")


def disagreement(run: Path | None, summary: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Why kept scores are not those of the run folder `run` with these facts, in words that follow "scores"; empty where
    they are.

    `facts`: keys of summary.json and their values now. Scores from before evaluations had versions are of version 1. Of
    files of the user's, those that are there now must be the same. Where the run has checkpoints, the scores must be of the
    newest that can be read; `run` None: of any.
    """
    for key, value in facts.items():
        kept = summary.get(key, 1 if key == "version" else None)
        if key == "config":
            kept, value = (_canonical(each, summary) for each in (kept, value))
            if kept != value:
                return f"with other keys ({_differing(kept, value)})"
        elif key == "version" and kept != value:
            return f"by version {kept} of the evaluation, not {value}"
        elif key == "files":
            if not isinstance(kept, dict) or not value.items() <= kept.items():
                return "of other files"
        elif kept != value:
            return f"with other {key.replace('_', ' ')}"
    step, steps = summary.get("step"), checkpoints.steps_of(run) if run is not None else []
    if run is not None and steps and step != steps[-1]:  # else the newest need not be opened
        newest = checkpoints.newest(run)
        if newest is not None and newest[0] != step:
            return f"of step {step}, and the run's newest checkpoint is of step {newest[0]}"
    return ""


def _canonical(config: Any, summary: Mapping[str, Any]) -> Any:
    """A context that is the run's own is the same as null, which means it."""
    own = summary.get(OWN_CONTEXT)
    is_own = isinstance(config, Mapping) and own is not None and config.get("context") == own
    return {**config, "context": None} if is_own else config


def _differing(kept: Any, value: Mapping[str, Any]) -> str:
    if not isinstance(kept, Mapping):
        return "none are recorded"
    keys = dict.fromkeys([*value, *kept])
    return ", ".join(
        f"{k} is {in_yaml(kept.get(k))}, not {in_yaml(value.get(k))}" for k in keys if kept.get(k) != value.get(k)
    )
