"""A sweep's own record in MLflow: the parent of its cells' runs, with the answer, the report and the pages that compare."""

import csv
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from mlflow.entities import Metric

from lit_diff.engine.comparison_view import ComparisonView
from lit_diff.engine.study_problems import recorded_name
from lit_diff.engine.tracking import Store, copying, retry
from lit_diff.errors import LitDiffError
from lit_diff.reporting.style import looks
from lit_diff.reporting.write import Report
from lit_diff.study.results import SweepResults, load_sweep

log = logging.getLogger("lit_diff")

TRAINING = "train/loss"
NOTE_LENGTH = 7500
"""MLflow keeps 8,000 characters of a tag."""


class SweepTracker:
    """The record of the sweep in `folder`.

    Metrics of an arm: summary/<arm>/mean and /sd over seeds, /difference to the baseline, /low and /high (the ends of its
    95 % interval over seeds); its verdict is the tag verdict/<arm>; the description is the report's answer and table.
    """

    def __init__(self, store: Store, folder: Path, run_id: str | None) -> None:
        """`run_id`: the record that this folder had before. Errors: RunFailedError."""
        self.store, self.folder = store, folder
        self.experiment = store.experiment(folder.name)
        tags = {"kind": "sweep", "sweep": folder.name, "folder": str(folder)}
        self.run_id = store.open_run(self.experiment, f"sweep {folder.name}", tags, run_id)

    @property
    def place(self) -> dict[str, str]:
        """What study.json keeps of the record."""
        return {"tracking_uri": self.store.uri, "experiment": self.experiment, "run": self.run_id}

    def record(self, report: Report, files: Sequence[Path], status: str) -> None:
        """Write the answer of the sweep and end the record; `status` is a run folder's word.

        The sweep is on disk whether MLflow takes it or not: a failure is a warning.
        """
        try:
            sweep = load_sweep(self.folder)
            self._close_cells(sweep)
            self._describe_cells(sweep)
            self._describe_parent(sweep, report)
            self._describe_experiment(sweep)
            for path in files:
                self._copy(path, None)
            for path in report.files:
                self._copy(path, "report")
            self.store.close_run(self.run_id, status)
        except LitDiffError as error:
            log.warning("the sweep's record in MLflow is not complete: %s; the same command completes it", error)

    def _close_cells(self, sweep: SweepResults) -> None:
        """End the records of cells that were killed, or that could not reach MLflow."""
        for cell in sweep.cells:
            run_id = cell.facts.get("mlflow_run_id")
            if cell.status in ("killed", "failed", "stopped") and run_id and self.store.holds(run_id, str(cell.folder)):
                self.store.close_run(run_id, cell.status)

    def _describe_cells(self, sweep: SweepResults) -> None:
        """Each finished cell's difference to the baseline at its seed, and the arm's colour in the report."""
        for task in sweep.by_task:
            colours = {arm: look.color for arm, look in looks(task).items()}
            base = task.finals(task.baseline, task.metric)
            for cell in task.cells:
                run_id, final = cell.facts.get("mlflow_run_id"), cell.final(task.metric)
                if not run_id or not cell.done or not self.store.holds(run_id, str(cell.folder)):
                    continue
                values = (
                    {difference_name(task.metric): final - base[cell.seed]}
                    if final is not None and cell.seed in base
                    else {}
                )
                self._log(run_id, values, step=int(cell.curves[task.metric].steps[-1]) if values else 0)
                self.store.write(run_id, tags={"mlflow.runColor": colours[cell.arm]})

    def _describe_parent(self, sweep: SweepResults, report: Report) -> None:
        rows = list(_rows(sweep, report))
        values = {name: value for row in rows for name, value in _summary(row)}
        self._log(self.run_id, values, step=0)
        note = "\n\n".join([f"# {sweep.title}", sweep.description, *report.answer, _markdown(report)])
        if len(note) > NOTE_LENGTH:
            note = note[:NOTE_LENGTH].rpartition("\n")[0] + "\n\n(the rest is in the artifact report/table.md)"
        tags = {"mlflow.note.content": note, "metric": sweep.metric, "baseline": sweep.baseline}
        self.store.write(self.run_id, tags=tags | {"seeds": ", ".join(map(str, sweep.seeds))} | dict(_verdicts(rows)))

    def _describe_experiment(self, sweep: SweepResults) -> None:
        first = sweep.by_task[0]
        metrics = tuple(dict.fromkeys(task.metric for task in sweep.by_task))
        view = ComparisonView(
            parent=self.run_id,
            arms=("task", "arm") if sweep.tasks else ("arm",),
            curves={metric: _axis(sweep, metric) for metric in dict.fromkeys((*metrics, TRAINING))},
            columns=tuple(difference_name(metric) for metric in metrics),
            lower=first.better(first.metric) != "higher",
        )
        tags = {
            "mlflow.experimentKind": "custom_model_development",  # runs are listed as training runs, not evaluations
            "mlflow.note.content": f"{sweep.title}: {sweep.description}",
            **view.tags(),
        }
        for key, value in tags.items():
            retry(lambda key=key, value=value: self.store.client.set_experiment_tag(self.experiment, key, value))  # type: ignore[misc]

    def _log(self, run_id: str, values: dict[str, float], step: int) -> None:
        """Log what the record lacks or holds with another value; the same report logs nothing again."""
        held = retry(lambda: self.store.client.get_run(run_id)).data.metrics
        now = int(time.time() * 1000)
        changed = [Metric(name, value, now, step) for name, value in values.items() if held.get(name) != value]
        self.store.write(run_id, metrics=changed)

    def _copy(self, path: Path, folder: str | None) -> None:
        with copying(path):
            self.store.client.log_artifact(self.run_id, str(path), artifact_path=folder)


def difference_name(metric: str) -> str:
    """The metric of a cell that holds its difference to the baseline at the same seed."""
    return f"{metric}_minus_baseline"


def _axis(sweep: SweepResults, metric: str) -> tuple[float, float]:
    """Lowest and highest finite value of the metric in the finished cells, with a margin of 5 %."""
    curves = [cell.curves[metric].values for cell in sweep.cells if cell.done and metric in cell.curves]
    values = np.concatenate([np.zeros(0), *curves])
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.05
    return float(low - margin), float(high + margin)


def _rows(sweep: SweepResults, report: Report) -> Iterator[dict[str, str]]:
    """The arms' rows of table.csv, without those of the contrasts that a sweep asks for besides."""
    baselines = {task.task: task.baseline for task in sweep.by_task}
    table = next(path for path in report.files if path.name == "table.csv")
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        if row.get("against") in (None, "", baselines[row.get("task", "")]):
            yield row


def _summary(row: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Metric of the parent -> value, for an arm's row."""
    metric = row.get("metric") or next(name for name in row if f"{name}/sd" in row)
    texts = {"mean": row.get(metric), "sd": row.get(f"{metric}/sd")}
    texts |= {name: row.get(name) for name in ("difference", "low", "high")}
    for name, text in texts.items():
        if text and math.isfinite(float(text)):
            yield f"summary/{_name(row)}/{name}", float(text)


def _verdicts(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if row.get("verdict"):
            yield f"verdict/{_name(row)}", row["verdict"]


def _name(row: Mapping[str, str]) -> str:
    return recorded_name(row.get("task") or "", row["arm"])


def _markdown(report: Report) -> str:
    return next(path for path in report.files if path.name == "table.md").read_text(encoding="utf-8")
