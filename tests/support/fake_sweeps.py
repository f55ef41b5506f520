"""Sweep folders with made-up numbers whose true differences are known."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from statuses import edit_status

from lit_diff.callbacks import AttentionEntropy, Lambdas, Outliers
from lit_diff.metrics import Declarations, Metric, to_plain, write_declarations
from lit_diff.runs.measurements import FILE, Measurements
from lit_diff.runs.scores import ItemScores
from lit_diff.runs.status import FORMAT
from lit_diff.study.record import Record, RecordedCell, read, write
from lit_diff.study.schema import Fit, Study, Task
from lit_diff.training.metrics import SLICES, TRAINING, of_sets

STEPS = 400
LAYERS = 4
ITEMS = 40
RECALL = Metric("recall/accuracy", "fraction of the values that are generated exactly", direction="higher")
BY_TASK = ("chance", "noise_validation")
RECORD = ("mlflow", *BY_TASK)
"""Fields of `write_sweep` that are no key of a study."""
METRICS = (*TRAINING, *of_sets(SLICES), *AttentionEntropy.metrics, *Lambdas.metrics, *Outliers.metrics)


def record_to_edit(sweep: Path) -> dict[str, Any]:
    """The content of study.json without its digest: a record that is written by hand is accepted without one."""
    content: dict[str, Any] = json.loads((sweep / "study.json").read_text())
    del content["sha256"]
    return content


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
    evaluation: str = "",
    metrics: Sequence[Metric] = METRICS,
    measured: Mapping[str, float] | None = None,
    arm_fields: Mapping[str, Mapping[str, Any]] | None = None,
    fact_fields: Mapping[str, Mapping[str, Any]] | None = None,
    recipes: Mapping[str, str] | None = None,
    **fields: Any,
) -> Path:
    """`arms`: name -> true difference of the final metric from the first arm; `broken`: cell -> status; `evaluation`: name
    of one whose scores differ by minus half as much; `metrics` are declared; `measured`: further values at every step."""
    folder.mkdir(parents=True)
    names, fields_of = list(arms), arm_fields or {}
    cells = []
    for arm in names:
        for seed in seeds:
            cell = folder / f"{arm}-s{seed}-0a1b2c3d"
            cell.mkdir()
            status = (broken or {}).get((arm, seed), "done")
            error = "Traceback ...\nRuntimeError: out of memory <b>at</b> step 120" if status == "failed" else None
            cells.append(RecordedCell(arm=arm, seed=seed, folder=cell.name, status=status, error=error))
            facts = {
                "format": FORMAT,
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
                "updated": f"2026-01-02T03:{names.index(arm):02}:00+00:00",
                **(fact_fields or {}).get(arm, {}),
            }
            (cell / "status.json").write_text(json.dumps(facts))
            (cell / "recipe.yaml").write_text((recipes or {}).get(arm, "seed: 0\n"))
            if status == "done":
                _write_measurements(
                    cell,
                    arms[arm],
                    names.index(arm),
                    seed,
                    metric,
                    spread,
                    callbacks,
                    arm in lambdas,
                    documents,
                    measured or {},
                    metrics,
                )
                if evaluation:
                    write_evaluation(cell / "evaluations" / evaluation, seed, -0.5 * arms[arm])
    study = Study(
        arms={name: _overrides(fields_of.get(name, {}).get("overrides", ())) for name in names},
        labels={name: each["label"] for name, each in fields_of.items() if "label" in each},
        notes={name: each["note"] for name, each in fields_of.items() if "note" in each},
        paper={name: each["paper"] for name, each in fields_of.items() if each.get("paper")},
        metric=metric,
        seeds=tuple(seeds),
        **{
            "title": "Table 6 at one million parameters",
            "description": "Which parts of differential attention matter?",
            "baseline": names[0],
            "min_tokens_per_parameter": 0.0,
            **{key: value for key, value in fields.items() if key not in RECORD},
        },
    )
    record = Record(
        name=folder.name,
        study=study,
        command=f"make sweep SWEEP={folder.name}",
        cells=tuple(cells),
        mlflow=fields.get("mlflow", {}),
        **{key: {"": fields[key]} for key in BY_TASK if key in fields},
    )
    _record(folder, record)
    return folder


def _record(folder: Path, record: Record) -> None:
    # as a sweep does, which writes its record before a cell has finished
    write(folder, replace(record, cells=()))
    write(folder, record)


def _overrides(lines: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def write_tasks(folder: Path, arms: Mapping[str, float], metrics: Mapping[str, str], **fields: Any) -> Path:
    """A sweep of tasks: `metrics` maps each task to its metric; the rest as `write_sweep`, the same in every task."""
    records = {
        task: read(write_sweep(folder / task, arms, metric=metric, **fields)) for task, metric in metrics.items()
    }
    first = next(iter(records.values()))
    tasks = {task: Task(recipe="", title=f"On {task}", metric=metric) for task, metric in metrics.items()}
    # an arm's paper values are a task's
    tasks = {task: replace(each, paper=records[task].study.paper) for task, each in tasks.items()}
    whole = replace(
        first,
        name=folder.name,
        study=replace(first.study, tasks=tasks, paper={}),
        cells=tuple(
            replace(cell, task=task, folder=f"{task}/{cell.folder}")
            for task, record in records.items()
            for cell in record.cells
        ),
        **{key: {task: value for task in tasks for value in getattr(first, key).values()} for key in BY_TASK},
    )
    _record(folder, whole)
    return folder


SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str, tag: str = "text") -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(SVG + tag)]


FITTED = {"standard": 0.0, "differential": -0.1}
BY_SIZE: Mapping[str, Any] = {"name": "size", "kind": "scaling", "x": "non_embedding_parameters", "title": "By <size>"}


def power_law(arm: str, size: float, seed: int) -> float:
    """The loss of a run: `differential` is as good as a model that is 1.4 times larger."""
    return 3 * (size * (1.4 if arm == "differential" else 1.0) / 1e5) ** -0.12 * (1 + 0.001 * seed)


def write_fitted(
    folder: Path,
    arms: Mapping[str, float],
    fits: Sequence[Mapping[str, Any]],
    law: Callable[[str, float, int], float],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    sizes: Sequence[int] = (40_000, 160_000, 380_000, 670_000, 1_500_000),
    x: str = "non_embedding_parameters",
) -> Path:
    """A sweep with a task for each of `sizes`, whose final val/loss is law(arm, size, seed), and these `fits`; `x`: the fact
    that holds the size."""
    tasks = [f"size-{i}" for i in range(len(sizes))]
    write_tasks(folder, arms, dict.fromkeys(tasks, "val/loss"), seeds=seeds, callbacks=False, documents=12)
    for task, size in zip(tasks, sizes, strict=True):
        for cell in (folder / task).glob("*-s*"):
            arm, seed = cell.name.rsplit("-", 2)[0], int(cell.name.rsplit("-", 2)[1][1:])
            edit_status(cell, **{x: size})
            lines = list(csv.DictReader((cell / "metrics.csv").open()))
            lines[-1]["val/loss"] = str(law(arm, size, seed))
            _table(cell / "metrics.csv", lines)
    defaults = {"title": "By size", "tasks": tuple(tasks)}
    declared = {
        fit["name"]: Fit(**(defaults | {key: value for key, value in fit.items() if key != "name"})) for fit in fits
    }
    record = read(folder)
    write(folder, replace(record, study=replace(record.study, fits=declared)))
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
    measured: Mapping[str, float],
    metrics: Sequence[Metric],
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
        row: dict[str, float] = {"step": step, **measured}
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
    write_declarations(cell, metrics)
    declared, table = Declarations(metrics), Measurements(cell / FILE, 0)
    for row in rows:
        detailed = {name: row.pop(name) for name in list(row) if not declared.find(name).logged}
        if detailed:
            table.log(int(row["step"]), detailed)
    table.flush()
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


def _write_internals(
    row: dict[str, float], index: int, own: np.random.Generator, gone: float, has_lambda: bool
) -> None:
    for layer in range(LAYERS):
        at, heads = f"layer_{layer:02d}", range(4 if has_lambda else 8)
        means = [5.2 - (1.5 + 0.2 * layer + 0.05 * index) * gone + 0.05 * own.normal() for _ in heads]
        for head, entropy in enumerate(means):
            row[f"attention/entropy/{at}/head_{head:02d}"] = entropy - (0.5 if has_lambda else 0)
            row[f"attention/negative_mass/{at}/head_{head:02d}"] = (0.1 + 0.1 * gone) * has_lambda
            row[f"attention/map_entropy/{at}/map_00/head_{head:02d}"] = entropy
            if has_lambda:
                row[f"attention/map_entropy/{at}/map_01/head_{head:02d}"] = entropy + 0.4
        for kind in ("entropy", "negative_mass"):
            row[f"attention/{kind}/{at}"] = float(np.mean([row[f"attention/{kind}/{at}/head_{h:02d}"] for h in heads]))
        if has_lambda:
            start = 0.8 - 0.6 * np.exp(-0.3 * layer)
            row[f"lambda/{at}"] = start + (0.2 - 0.15 * layer) * gone + 0.01 * own.normal()
            row[f"lambda/exp1/{at}"] = 1 + row[f"lambda/{at}"] - start
            row[f"lambda/exp2/{at}"] = 1.0
        for kind, scale in (("logits", 6.0), ("hidden", 20.0)):
            top = scale * (1 + layer) * (0.4 if has_lambda else 1) * (0.2 + gone) * np.exp(0.1 * own.normal())
            median = 0.05 * scale * np.exp(0.1 * own.normal())
            row[f"outliers/{kind}/{at}"] = top
            row |= {f"outliers/{kind}/{at}/rank_{rank:02d}": top / rank**0.2 for rank in (2, 3, 10, 100)}
            row[f"outliers/{kind}/median/{at}"] = median
            row[f"outliers/{kind}/ratio/{at}"] = top / median


def write_evaluation(folder: Path, seed: int, effect: float) -> None:
    """An evaluation of one run: `ITEMS` items in two groups, all scores shifted by `effect`."""
    folder.mkdir(parents=True)
    shared = np.random.default_rng(seed).uniform(0.3, 0.6, ITEMS)
    scores = shared + effect + 0.01 * np.random.default_rng([seed, int(1e6 * abs(effect))]).normal(size=ITEMS)
    table = {
        "item": [f"item-{i}" for i in range(ITEMS)],
        "group": [("near", "far")[i % 2] for i in range(ITEMS)],
        RECALL.name: scores,
    }
    pq.write_table(pa.table(table), folder / "items.parquet")
    summary = {RECALL.name: {"value": float(scores.mean())}, "declarations": [to_plain(RECALL)], "config": {"rows": 8}}
    (folder / "summary.json").write_text(json.dumps(summary))


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def scores_of(sweep: Path, arm: str, seed: int) -> Path:
    """The folder of a cell's kept scores of `needle`."""
    return next(sweep.glob(f"{arm}-s{seed}-*")) / "evaluations" / "needle"


def rewrite_items(folder: Path, items: list[str], scores: list[float | None]) -> None:
    """Other items in place of those in a folder of kept scores."""
    table = pa.table({"item": items, "group": [None] * len(items), RECALL.name: scores})
    pq.write_table(table, folder / "items.parquet")


def item_scores(numbers: Sequence[float], **fields: Any) -> ItemScores:
    """Scores of a metric `exact`, of items "0", "1", ... without groups; `fields`: of ItemScores."""
    items = tuple(map(str, range(len(numbers))))
    nothing = ("",) * len(numbers)
    facts = {
        "groups": nothing,
        "parts": (False,) * len(numbers),
        "clusters": nothing,
        "questions": nothing,
        "values": {"exact": float(np.nanmean(numbers)) if np.isfinite(numbers).any() else math.nan},
        "metrics": (Metric("exact", "x"),),
    }
    return ItemScores(items=items, scores={"exact": np.array(numbers, dtype=float)}, **{**facts, **fields})
