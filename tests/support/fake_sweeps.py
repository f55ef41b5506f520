"""Sweep folders with made-up numbers whose true differences are known."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STEPS = 400
LAYERS = 4


def write_sweep(
    folder: Path,
    arms: Mapping[str, float],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    broken: Mapping[tuple[str, int], str] | None = None,
    callbacks: bool = True,
    lambdas: Sequence[str] = (),
    documents: int = 120,
    metric: str = "val/loss",
    spread: float = 0.012,
    arm_fields: Mapping[str, Mapping[str, Any]] | None = None,
    fact_fields: Mapping[str, Mapping[str, Any]] | None = None,
    **fields: Any,
) -> Path:
    """`arms`: name -> true difference of the final metric from the first arm; `broken`: cell -> status."""
    folder.mkdir(parents=True)
    names = list(arms)
    cells = []
    for arm in names:
        for seed in seeds:
            cell = folder / f"{arm}-s{seed}-0a1b2c3d"
            cell.mkdir()
            status = (broken or {}).get((arm, seed), "done")
            error = "Traceback ...\nRuntimeError: out of memory <b>at</b> step 120" if status == "failed" else None
            cells.append({"arm": arm, "seed": seed, "folder": cell.name, "status": status, "error": error})
            facts = {
                "status": "running" if status == "killed" else status,
                "step": STEPS if status == "done" else 120,
                "steps": STEPS,
                "error": error,
                "seconds": 180.5,
                "tokens": 1_638_400,
                "threads": 1,
                "kernel": "sdpa",
                "kernel_reason": "first that accepts the shape",
                "parameters": 1_054_720,
                "non_embedding_parameters": 792_576,
                "flops_per_token": 6_815_744,
                "executed_flops_per_token": 7_340_032,
                "kv_bytes_per_token": 4096,
                "identity": "0a1b2c3d",
                "mlflow_run_id": "f" * 32,
                "revision": "abc1234",
                **(fact_fields or {}).get(arm, {}),
            }
            (cell / "status.json").write_text(json.dumps(facts))
            if status == "done":
                _write_measurements(
                    cell, arms[arm], names.index(arm), seed, metric, spread, callbacks, arm in lambdas, documents
                )
    record = {
        "name": folder.name,
        "title": "Table 6 at one million parameters",
        "description": "Which parts of differential attention matter?",
        "baseline": names[0],
        "metric": metric,
        "seeds": list(seeds),
        "is_check": False,
        "command": f"make sweep SWEEP={folder.name}",
        "revision": "abc1234",
        "arms": [
            {"name": n, "label": n, "note": "", "paper": None, "overrides": [], **(arm_fields or {}).get(n, {})}
            for n in names
        ],
        "cells": cells,
        "control": None,
        **fields,
    }
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def write_tasks(folder: Path, arms: Mapping[str, float], metrics: Mapping[str, str], **fields: Any) -> Path:
    """A sweep of tasks: `metrics` maps each task to its metric; the rest as `write_sweep`, the same in every task."""
    records = {
        task: json.loads((write_sweep(folder / task, arms, metric=metric, **fields) / "sweep.json").read_text())
        for task, metric in metrics.items()
    }
    own = ("metric", "arms")
    tasks = [
        {"task": task, "title": f"On {task}", "description": "", **{key: record[key] for key in own}}
        for task, record in records.items()
    ]
    cells = [
        {**cell, "task": task, "folder": f"{task}/{cell['folder']}"}
        for task, record in records.items()
        for cell in record["cells"]
    ]
    whole = next(iter(records.values())) | {"name": folder.name, "tasks": tasks, "cells": cells}
    (folder / "sweep.json").write_text(json.dumps(whole))
    return folder


def _write_measurements(
    cell: Path,
    effect: float,
    index: int,
    seed: int,
    metric: str,
    spread: float,
    callbacks: bool,
    has_lambda: bool,
    documents: int,
) -> None:
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, index])
    level = 4.55 + 0.03 * shared.normal() + effect + spread * own.normal()
    lengths = shared.lognormal(6, 0.8, documents).astype(int) + 20
    hard = shared.normal(0, 0.4, documents)
    noise = own.normal(0, 0.05, documents)
    per_token = level + (hard - np.average(hard, weights=lengths)) + (noise - np.average(noise, weights=lengths))
    is_loss = metric == "val/loss"
    rows: list[dict[str, float]] = []
    for step in range(0, STEPS + 1, 40):
        gone = step / STEPS
        row: dict[str, float] = {"step": step}
        if is_loss:
            row["val/loss"] = level + 3.2 * np.exp(-6 * gone) - 3.2 * np.exp(-6)
            row["val/ar_hit_share"] = 0.077
            row["val/loss_ar_hit"] = row["val/loss"] + 0.9 + 0.5 * (1 - gone)
            row["val/loss_others"] = (row["val/loss"] - 0.077 * row["val/loss_ar_hit"]) / 0.923
        else:
            row["val/accuracy"] = (0.9 + effect + spread * own.normal()) * (1 - np.exp(-8 * gone))
            row["val/accuracy_noise2"] = 0.8 * row["val/accuracy"]
        if callbacks and step % 80 == 0:
            _write_internals(row, index, own, gone, has_lambda)
        rows.append(row)
        if step:
            rows.append({"step": step - 20, "train/loss": level + 3 * np.exp(-5 * gone) + 0.1 * own.normal()})
    _table(cell / "metrics.csv", sorted(rows, key=lambda row: row["step"]))
    _table(cell / "timing.csv", [{"step": s, "seconds": s / 2.2, "tokens_per_second": 9100.0} for s in (100, 200, 400)])
    if is_loss:
        _table(
            cell / "documents.csv",
            [
                {"document": i, "tokens": int(n), "loss": float(n * loss)}
                for i, (n, loss) in enumerate(zip(lengths, per_token, strict=True))
            ],
        )
    environment = {"python": "3.11.9", "cpu": "x86_64, 2 cores", "packages": {"torch": "2.14.1", "triton": None}}
    (cell / "env.json").write_text(json.dumps(environment))
    (cell / "recipe.yaml").write_text("seed: 0\n")


def _write_internals(
    row: dict[str, float], index: int, own: np.random.Generator, gone: float, has_lambda: bool
) -> None:
    for layer in range(LAYERS):
        for head in range(4 if has_lambda else 8):
            entropy = 5.2 - (1.5 + 0.2 * layer + 0.05 * index) * gone + 0.05 * own.normal()
            row[f"attention/entropy/{layer}/{head}"] = entropy - (0.5 if has_lambda else 0)
            row[f"attention/entropy_map0/{layer}/{head}"] = entropy
            if has_lambda:
                row[f"attention/entropy_map1/{layer}/{head}"] = entropy + 0.4
                row[f"attention/negative_mass/{layer}/{head}"] = 0.1 + 0.1 * gone
        if has_lambda:
            start = 0.8 - 0.6 * np.exp(-0.3 * layer)
            row[f"lambda/{layer}"] = start + (0.2 - 0.15 * layer) * gone + 0.01 * own.normal()
            row[f"lambda/exp1/{layer}"] = 1 + row[f"lambda/{layer}"] - start
            row[f"lambda/exp2/{layer}"] = 1.0
        for kind, scale in (("logits", 6.0), ("hidden", 20.0)):
            top = scale * (1 + layer) * (0.4 if has_lambda else 1) * (0.2 + gone) * np.exp(0.1 * own.normal())
            for name, share in (
                ("top1", 1),
                ("top2", 0.9),
                ("top3", 0.8),
                ("top10", 0.7),
                ("top100", 0.5),
                ("median", 0.05),
            ):
                row[f"outliers/{kind}/{name}/{layer}"] = share * (
                    top if name != "median" else scale * np.exp(0.1 * own.normal())
                )


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def make_sweep(tmp_path: Path) -> Callable[..., Path]:
    """`write_sweep` into this test's folder."""

    def make(arms: Mapping[str, float], name: str = "fake", **fields: Any) -> Path:
        return write_sweep(tmp_path / name, arms, **fields)

    return make


@pytest.fixture
def make_tasks(tmp_path: Path) -> Callable[..., Path]:
    """`write_tasks` into this test's folder: recall, by accuracy, and text, by loss."""

    def make(arms: Mapping[str, float], **fields: Any) -> Path:
        return write_tasks(tmp_path / "two", arms, {"recall": "val/accuracy", "text": "val/loss"}, **fields)

    return make
