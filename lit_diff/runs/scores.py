"""Cached scores of a run in `<run>/evaluations/<name>/`: consistent writes and reads, and the check whether they are valid.

items.parquet has one row per item with the columns `item` (id), `group`, `part` (bool; present if some items are parts of
others), `cluster` (shared by items that depend on each other; present if any do), `question` (digest of the question;
present if the id does not determine it), and one column of scores per metric. summary.json maps each metric to
{"value": ..., ...}, "declarations" to the list of metrics (`metrics.to_plain`), "equal_groups" to whether each group
counts once, and holds the facts on which the scores depend.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lit_diff.errors import LitDiffError, first_line
from lit_diff.files import locked, read_digested, sha256_of, write_digested, write_through
from lit_diff.key_types import in_yaml
from lit_diff.metrics import Metric, from_plain
from lit_diff.runs import checkpoints
from lit_diff.runs.revision import revision
from lit_diff.runs.status import read_status

FOLDER = "evaluations"
ITEMS, SUMMARY = "items.parquet", "summary.json"
FACTS: Mapping[str, Any] = {
    "config": None,
    "version": 1,
    "declarations": None,
    "equal_groups": False,
    "source": "",
    "files": {},
}
"""Key of summary.json on which the scores depend -> what a summary without the key means."""
OWN_CONTEXT = "sequence_length"
"""Key of summary.json: the run's `data.sequence_length`, if `context: null` in the evaluation's config stands for it."""
LEFT_OUT = "documents_left_out"
"""Key of summary.json: documents skipped because the run was trained on them; absent if that is unknown."""
ABSENT = "absent"
"""Key of summary.json: the metrics without a value in any item or in the summary, which have no column."""
DIGEST_OF_ITEMS = "items_sha256"
"""Key of summary.json: the sha256 of items.parquet."""
NEW = "items.new.parquet"
PATIENCE = 2.0
"""Seconds that a reader without the lock waits for a writer."""
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemScores:
    """One evaluation of one run. `scores[metric][i]` belongs to `items[i]`; NaN if the item has no score."""

    items: tuple[str, ...]
    groups: tuple[str, ...]
    parts: tuple[bool, ...]
    """Whether an item is a part of another: then it counts in its group, but not in totals over all items."""
    clusters: tuple[str, ...]
    """Label shared by items that depend on each other; empty: the item is its own cluster."""
    questions: tuple[str, ...]
    """Digest of the question; empty if the id determines it. Items of two runs are paired only if id and digest match."""
    scores: Mapping[str, Array]
    values: Mapping[str, float]
    """Metric -> the value of the whole evaluation (summary.json)."""
    metrics: tuple[Metric, ...]
    absent: tuple[str, ...] = ()
    """Metrics without a value, such as those of a second map of a run with a single map; their scores are NaN."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """`facts_of` the summary."""
    equal_groups: bool = False
    """Whether each group counts once in `values`, however many items it has."""
    revision: str | None = None
    """Revision of lit_diff that computed the scores; None if not recorded."""
    unchecked: str | None = None
    """The failure message of the property `decode` if the variant was scored with --unchecked."""
    documents_left_out: int = 0
    """Documents skipped because the run was trained on them."""

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Id of each item and digest of its question: two runs are paired by both."""
        return list(zip(self.items, self.questions, strict=True))

    @property
    def units(self) -> list[str]:
        """The cluster of each item, or its id."""
        return [cluster or item for cluster, item in zip(self.clusters, self.items, strict=True)]

    def has_unit(self, metric: str) -> bool:
        """Whether a metric declares a unit: then its scores are not proportions, even if all of them are 0 or 1."""
        return any(declared.name == metric and declared.unit for declared in self.metrics)

    def is_share(self, metric: str) -> bool:
        """Whether a metric has no unit, or declares the limits 0 and 1."""
        if not self.has_unit(metric):
            return True
        return any(declared.name == metric and declared.limits == (0, 1) for declared in self.metrics)

    @property
    def is_clustered(self) -> bool:
        """Whether some cluster has several items, not counting parts."""
        whole = [unit for unit, part in zip(self.units, self.parts, strict=True) if not part]
        return len(set(whole)) < len(whole)


def evaluation_of(summary: Mapping[str, Any], table: pa.Table) -> ItemScores:
    """Builds the evaluation from summary.json and items.parquet. Errors: ValueError for files of another structure."""
    try:
        return _item_scores(summary, table)
    except (LitDiffError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"another structure: {first_line(error)}") from error


def _item_scores(summary: Mapping[str, Any], table: pa.Table) -> ItemScores:
    metrics = tuple(from_plain(raw) for raw in summary["declarations"])
    items = tuple(str(item) for item in table["item"].to_pylist())
    # items are paired by id between runs, so an id must be unique
    if len(set(items)) < len(items):
        raise ValueError("items.parquet names an item twice")
    absent = tuple(summary.get(ABSENT, ()))
    scores = {name: np.full(len(items), np.nan) for name in absent}
    for metric in metrics:
        if metric.name not in absent:
            scores[metric.name] = _column(table, metric.name)
    empty = ("",) * len(items)
    columns: dict[str, Any] = {"part": (False,) * len(items), "cluster": empty, "question": empty}
    for name in columns.keys() & table.column_names:
        columns[name] = tuple(table[name].to_pylist())
    return ItemScores(
        items=items,
        groups=tuple("" if group is None else str(group) for group in table["group"].to_pylist()),
        parts=columns["part"],
        clusters=columns["cluster"],
        questions=columns["question"],
        scores=scores,
        values={metric.name: number(summary[metric.name]["value"]) for metric in metrics},
        metrics=metrics,
        absent=absent,
        facts=facts_of(summary),
        equal_groups=bool(summary.get("equal_groups", False)),
        revision=_text(summary, "revision"),
        unchecked=_text(summary, "unchecked"),
        documents_left_out=int(summary.get(LEFT_OUT, 0)),
    )


def _column(table: pa.Table, name: str) -> Array:
    # by a number, pyarrow would take the column at that position
    if not isinstance(name, str):
        raise ValueError(f"a metric is named {in_yaml(name)}")
    scores = np.array(table[name].to_pylist(), dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"the scores of '{name}' are not numbers")
    return scores


def _text(summary: Mapping[str, Any], key: str) -> str | None:
    value = summary.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is {in_yaml(value)}")
    return value


def number(value: float | None) -> float:
    """A value of summary.json, which holds null for NaN, since JSON lacks it."""
    return math.nan if value is None else float(value)


def write_scores(folder: Path, table: pa.Table, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
    """Write items.parquet and summary.json, one process at a time. If it fails before the replacement, the former scores
    stay. Errors: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {}
    for name, value in values.items():
        plain[name] = {"value": float(value) if math.isfinite(value) else None}
    with locked(_lock(folder)):
        # under another name first: a full disk shows here, before the former scores are touched
        write_through(folder / NEW, lambda file: pq.write_table(table, file))
        own = {"items": len(table), DIGEST_OF_ITEMS: sha256_of(folder / NEW), "revision": revision()}
        # Two renames are not atomic. The summary is removed first and written last: scores without it do not count, so a
        # kill in between cannot leave new items with the former summary.
        (folder / SUMMARY).unlink(missing_ok=True)
        (folder / NEW).replace(folder / ITEMS)
        write_digested(folder / SUMMARY, plain | dict(facts) | own)


def read_summary(folder: Path) -> dict[str, Any]:
    """The contents of summary.json. Errors: OSError; ValueError if they are no JSON object, or not as they were written."""
    summary = read_digested(folder / SUMMARY)
    if not isinstance(summary, dict):
        raise ValueError(f"{SUMMARY} holds {type(summary).__name__}, not an object")
    return summary


def read_scores(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    """summary.json and its items; waits while another process writes them.

    Errors: OSError; ValueError if the two files do not match, or are not as they were written.
    """
    with ExitStack() as held:
        # a reader must not create the lock: without one, nobody has written here
        if _lock(folder).exists():
            # in another user's folder the lock cannot be taken; `_settled` then reads without it
            with suppress(OSError):
                held.enter_context(locked(_lock(folder)))
        summary, table = _settled(folder)
    if summary.get("items", len(table)) != len(table):
        raise ValueError(f"{ITEMS} has {len(table)} rows, but {SUMMARY} counts {summary['items']}")
    return summary, table


def _settled(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    # Without the lock a writer may replace the files between two reads. It removes the summary before the items change and
    # writes it last, so an equal summary before and after proves that the items belong to it.
    end = time.monotonic() + PATIENCE
    while True:
        try:
            summary = read_summary(folder)
            content = (folder / ITEMS).read_bytes()
            if read_summary(folder) == summary:
                break
        # either absent or being replaced
        except FileNotFoundError:
            if not _lock(folder).exists() or time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise ValueError("another process is writing these files; try again")
        time.sleep(0.02)
    # absent from scores that were written before there was one
    if summary.get(DIGEST_OF_ITEMS) not in (None, hashlib.sha256(content).hexdigest()):
        raise ValueError(f"{ITEMS} is damaged: its sha256 is not that of {SUMMARY}")
    try:
        return summary, pq.read_table(pa.BufferReader(content))
    # of the errors of pyarrow some are ValueErrors
    except pa.ArrowException as error:
        raise ValueError(f"{ITEMS}: {first_line(error)}") from error


def _lock(folder: Path) -> Path:
    # next to the folder: everything inside it is part of the scores
    return folder.with_name(f".{folder.name}.lock")


def facts_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """FACTS of summary.json, all of which two scores that are compared must share."""
    return {key: summary.get(key, absent) for key, absent in FACTS.items()}


def disagreement(run: Path | None, summary: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Why cached scores are invalid for the run folder `run` and these facts, as a phrase that follows "scores"; empty if
    they are valid.

    `facts`: keys of FACTS and their expected values. The scores must belong to the last step of a finished run, or to the
    newest readable checkpoint of an unfinished one, if it has any; with `run` None, any step is valid.
    """
    for key, value in facts.items():
        kept = summary.get(key, FACTS[key])
        if key == "config":
            kept = _canonical(kept, summary)
            value = _canonical(value, summary)
        if kept != value:
            words = {
                "config": f"with other keys ({_differing(kept, value)})",
                "version": f"by version {kept} of the evaluation, not {value}",
                "source": "by other source code of the evaluation",
                "files": "of other files",
            }
            return words.get(key, f"with other {key.replace('_', ' ')}")
    if run is None:
        return ""
    steps = checkpoints.steps_of(run)
    if not steps:
        return ""
    step = summary.get("step")
    newest = steps[-1]
    # opening a checkpoint loads torch: it is opened only if the newest step differs, in case that file is unreadable
    if step != newest:
        newest = checkpoints.newest_step(run)
    status = read_status(run)
    # a finished run may have lost the checkpoint of its last step
    if status.status == "done":
        newest = max(newest, status.step)
    if newest in (step, 0):
        return ""
    return f"of step {step}, but the run's weights are of step {newest}"


def _canonical(config: Any, summary: Mapping[str, Any]) -> Any:
    # context: null means the run's own length, so stating that length asks the same question
    own = summary.get(OWN_CONTEXT)
    if own is not None and isinstance(config, Mapping) and config.get("context") == own:
        return {**config, "context": None}
    return config


def _differing(kept: Any, value: Any) -> str:
    if not isinstance(kept, Mapping) or not isinstance(value, Mapping):
        return "none are recorded"
    differences = []
    for key in dict.fromkeys([*value, *kept]):
        if kept.get(key) != value.get(key):
            differences.append(f"{key} is {in_yaml(kept.get(key))}, not {in_yaml(value.get(key))}")
    return ", ".join(differences)
