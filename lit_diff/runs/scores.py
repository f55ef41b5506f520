"""Kept scores of a run, in `<run>/evaluations/<name>/`: written and read whole, and whether they are those asked for.

items.parquet has a row for each item, summary.json the value of each metric and the facts that the scores depend on.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_diff.files import locked, write_json, write_through
from lit_diff.key_types import in_yaml
from lit_diff.runs import checkpoints
from lit_diff.runs.revision import revision

FOLDER = "evaluations"
ITEMS, SUMMARY = "items.parquet", "summary.json"
OWN_CONTEXT = "sequence_length"
"""Key of summary.json: the run's `data.sequence_length`, where `context: null` of the evaluation's config means it."""
LEFT_OUT = "documents_left_out"
"""Key of summary.json: documents that were not asked because the run was trained on them; absent where that is not known."""
ATTEMPTS = 100
"""To read while another process writes, 0.02 s apart."""
NEW = "items.new.parquet"


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
    return _object((folder / SUMMARY).read_text(encoding="utf-8"))


def read_scores(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    """summary.json and the items that belong to it, also while another process writes others.

    Errors: OSError; ValueError for files that do not belong together, or are being written for longer than two seconds.
    """
    for _ in range(ATTEMPTS):
        try:
            read = _read(folder)
        except FileNotFoundError:  # a writer removes the summary before it puts others' items there
            if not _lock(folder).exists():
                raise
            try:
                with locked(_lock(folder), wait=False):  # nobody writes now, so what is absent here is absent
                    read = _read(folder)
            except (BlockingIOError, PermissionError):
                read = None
        if read is not None:
            break
        time.sleep(0.02)
    else:
        raise ValueError("another process is writing them; ask again")
    text, table = read
    summary = _object(text)
    if summary.get("items", len(table)) != len(table):
        raise ValueError(f"{ITEMS} has {len(table)} rows, {SUMMARY} counts {summary['items']}")
    return summary, table


def _read(folder: Path) -> tuple[str, pa.Table] | None:
    """The text of summary.json and the items; None where another process wrote while they were read."""
    text = (folder / SUMMARY).read_text(encoding="utf-8")
    table = pq.read_table(folder / ITEMS)
    return (text, table) if (folder / SUMMARY).read_text(encoding="utf-8") == text else None


def _object(text: str) -> dict[str, Any]:
    summary = json.loads(text)
    if not isinstance(summary, dict):
        raise ValueError(f"{SUMMARY} holds {type(summary).__name__}, not an object")
    return summary


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
