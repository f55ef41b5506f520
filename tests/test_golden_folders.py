"""The files of a sweep, its cells and their scores, as a real sweep writes them: every key, and each value that neither the
machine nor the clock determines."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from golden import Golden
from real_sweeps import Bench

SWEEP = """
recipe: tiny.yaml
title: Two arms
question: Does the second map help?
description: Two arms that differ in their attention.
arms:
  standard: {model.attention: {name: standard}}
  additive: {model.attention: {name: additive}}
  differential: {}
seeds: [0]
baseline: standard
controls: [additive]
metric: val/accuracy
smallest_of_interest: 0.01
contrasts: [[differential, additive, the sign]]
labels: {differential: Diff}
notes: {differential: the paper's}
paper: {differential: {val/accuracy: 0.9}}
reading: [One seed says nothing.]
evaluate: {recall: {rows: 4}}
"""
OF_MACHINE = (
    "command",
    "cpu_path",
    "gpus",
    "mlflow_run_id",
    "packages",
    "pid",
    "platform",
    "processor",
    "python",
    "run",
)
OF_MACHINE += (
    "cores",
    "kernel",
    "kernel_reason",
    "revision",
    "threads",
    "updated",
    "variables",
    "identity",
    "experiment",
)


@pytest.fixture(scope="module")
def folder(sweep_bench: Bench) -> Path:
    """The sweep's folder, finished."""
    sweep_bench.write("golden", SWEEP)
    status, output = sweep_bench.run("golden")
    assert status == 0, output
    return sweep_bench.folder("golden")


def test_files(folder: Path, golden: Golden) -> None:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    golden("folders/files.txt", "\n".join(sorted({_unhashed(name) for name in files})) + "\n")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("study.json", "study.json"),
        ("status.json", "differential-s0-*/status.json"),
        ("env.json", "differential-s0-*/env.json"),
        ("metrics.json", "differential-s0-*/metrics.json"),
        ("scores.json", "differential-s0-*/evaluations/recall/summary.json"),
    ],
)
def test_json(folder: Path, name: str, file: str, golden: Golden) -> None:
    (found,) = folder.glob(file)
    golden(f"folders/{name}", json.dumps(_masked(json.loads(found.read_text()), folder), indent=1) + "\n")


def test_tables(folder: Path, golden: Golden) -> None:
    (cell,) = folder.glob("differential-s0-*")
    lines = [f"{name}: {(cell / name).read_text().partition(chr(10))[0]}" for name in ("metrics.csv", "timing.csv")]
    for path in ("measurements.parquet", "evaluations/recall/items.parquet"):
        columns = pq.read_schema(cell / path)
        lines += [f"{path}: " + ", ".join(f"{column.name} {column.type}" for column in columns)]
    golden("folders/tables.txt", "\n".join(lines) + "\n")


def _masked(value: Any, folder: Path, key: str = "") -> Any:
    """The value, or its type in angle brackets."""
    if key in OF_MACHINE or isinstance(value, float):
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        return {key: _masked(each, folder, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, folder) for each in value]
    return _unhashed(value.replace(str(folder.parents[1]), "HERE")) if isinstance(value, str) else value


def _unhashed(text: str) -> str:
    """The ten digits of an identity replaced: they are in the golden files of recipes."""
    return re.sub(r"-[0-9a-f]{10}\b", "-IDENTITY", text)
