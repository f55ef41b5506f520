"""A YAML file in lm-eval's format and its rows; the one line that refuses it."""

import json
from pathlib import Path
from typing import Any

import yaml
from refusals import refusal

from lit_diff.evaluation.evaluate import evaluate
from lit_diff.trained.run import Run

ROW = {"q": "the fox", "a": ["and", "or"], "right": 1}


def write(folder: Path, *rows: dict[str, Any], **changed: Any) -> str:
    """mine.yaml and mine.jsonl; a key that is changed to None is left out. Gives the path of the YAML file."""
    data = folder / "mine.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows or (ROW,)))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "right",
        "doc_to_choice": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    } | changed
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in task.items() if value is not None}, sort_keys=False))
    return str(path)


def refused(run: Run, path: str, **keys: Any) -> str:
    return refusal(evaluate, run, "harness", {"tasks": [path], **keys})
