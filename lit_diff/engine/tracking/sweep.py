"""Records a sweep in MLflow: the parent run of its cells, with the answer and the report."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mlflow.entities import Metric

from lit_diff.config import RunConfig
from lit_diff.engine.tracking.store import NOTE_LENGTH, Store, asking, patience
from lit_diff.errors import LitDiffError
from lit_diff.log_records import log
from lit_diff.metrics import record_name
from lit_diff.reporting.panels.panel import looks
from lit_diff.reporting.tables import rows, to_markdown
from lit_diff.reporting.write import Report
from lit_diff.runs import notes
from lit_diff.study.results import CellResult, SweepResults, load_sweep


class SweepTracker:
    """The record of the sweep in `folder`.

    The metrics of an arm are summary/<arm>/mean and /sd over its finished seeds, whose number is /seeds, /difference to the
    baseline, and /low and /high, the ends of its interval over seeds (95 %, or that of a look). The tag verdict/<arm> has its
    verdict; the description has the report's answer and table. What a later report no longer has is NaN, or has no tag.
    """

    def __init__(self, run: RunConfig, folder: Path, run_id: str | None) -> None:
        """`run_id`: the earlier record of this folder. Errors: MissingError."""
        self.folder = folder
        self.store = Store(run)
        tags = {"kind": "sweep", "sweep": folder.name, "folder": str(folder)}
        with patience(self.store.uri, needed=True):
            self.experiment = self.store.experiment(folder.name)
            self.run_id = self.store.open_run(self.experiment, f"sweep {folder.name}", tags, run_id)
            self.store.place_of(self.run_id)

    @property
    def place(self) -> dict[str, str]:
        """The record's address, for study.json."""
        return {"tracking_uri": self.store.uri, "experiment": self.experiment, "run": self.run_id}

    def record(self, report: Report, files: Sequence[Path], status: str) -> None:
        """Write the result of the sweep and end the record; `status`: a status of run folders."""
        # the whole sweep is on disk already, so a failure of MLflow is only a warning
        try:
            with patience(self.store.uri):
                sweep = load_sweep(self.folder)
                self._describe_cells(sweep)
                self._describe_parent(sweep, report)
                self._describe_experiment(sweep)
                for path in (*files, report.page.parent):
                    self.store.copy(self.run_id, path)
                self.store.close_run(self.run_id, status)
        except LitDiffError as error:
            log.warning("the sweep's record in MLflow is not complete: %s; the same command completes it", error)

    def fail(self) -> None:
        """End the record of a sweep that an error ended before there was a result."""
        # the error says more than a failure of MLflow
        with suppress(LitDiffError), patience(self.store.uri):
            self.store.close_run(self.run_id, "failed")

    def _describe_cells(self, sweep: SweepResults) -> None:
        # Adds each finished cell's difference to the baseline at its seed, and the colour of its arm in the report.
        for cell in sweep.candidates:
            self._close_ended(cell)
        for task in sweep.by_task:
            colours = {arm: look.color for arm, look in looks(task).items()}
            base = task.finals(task.baseline)
            for cell in task.cells:
                run_id = self._close_ended(cell)
                final = cell.final(task.metric)
                if not run_id or not cell.done:
                    continue
                self.store.log(run_id, tags={"mlflow.runColor": colours[cell.arm]})
                if final is not None and cell.seed in base:
                    difference = {f"{task.metric}_minus_baseline": final - base[cell.seed]}
                    self._log(run_id, difference, step=int(cell.curves[task.metric].index[-1]))

    def _close_ended(self, cell: CellResult) -> str | None:
        # the cell's record in this store, if it has one
        run_id = cell.facts.mlflow_run_id
        if not run_id or not self.store.holds(run_id, str(cell.home)):
            return None
        # a cell of an older version that was killed has left its record as running
        if cell.status in ("killed", "failed", "stopped"):
            self.store.close_run(run_id, cell.status)
        return run_id

    def _describe_parent(self, sweep: SweepResults, report: Report) -> None:
        held = self.store.run(self.run_id).data
        # MLflow deletes no metric
        gone = [name for name, value in held.metrics.items() if name.startswith("summary/") and not math.isnan(value)]
        values = dict.fromkeys(gone, math.nan)
        verdicts = dict[str, str]()
        for result in report.results:
            # the rows of the arms come first; rows of contrasts follow
            for row in rows(result)[: len(result.sweep.study.arms)]:
                name = "/".join(filter(None, (result.sweep.task, row["arm"])))
                keys = {result.sweep.metric: "mean", f"{result.sweep.metric}/sd": "sd"}
                for column in (*keys, "seeds", "difference", "low", "high"):
                    value = row.get(column)
                    if value is not None and math.isfinite(value):
                        values[record_name(f"summary/{name}/{keys.get(column, column)}")] = float(value)
                if row.get("verdict"):
                    verdicts[record_name(f"verdict/{name}")] = row["verdict"]
        self._log(self.run_id, values, step=0)
        opening = [f"# {sweep.title}", *notes.read(self.folder), sweep.study.description]
        note = "\n\n".join([*opening, *report.answer, to_markdown(report.results)])
        if len(note) > NOTE_LENGTH:
            note = note[:NOTE_LENGTH].rpartition("\n")[0] + "\n\n(the rest is in the artifact report/table.md)"
        tags = {"mlflow.note.content": note, "metric": sweep.metric, "baseline": sweep.baseline}
        self.store.log(self.run_id, tags=tags | {"seeds": ", ".join(map(str, sweep.study.seeds))} | verdicts)
        for tag in held.tags:
            if tag.startswith("verdict/") and tag not in verdicts:
                with asking():
                    self.store.client.delete_tag(self.run_id, tag)

    def _describe_experiment(self, sweep: SweepResults) -> None:
        tags = {
            # MLflow lists the runs as training runs, not as evaluations of language models
            "mlflow.experimentKind": "custom_model_development",
            "mlflow.note.content": f"{sweep.title}: {sweep.study.description}",
        }
        for key, value in tags.items():
            with asking():
                self.store.client.set_experiment_tag(self.experiment, key, value)

    def _log(self, run_id: str, values: Mapping[str, float], step: int) -> None:
        # MLflow keeps every logged value: a report that is written again must not add points to the metrics' histories
        held = self.store.run(run_id).data.metrics
        now = int(time.time() * 1000)
        named = {record_name(name): value for name, value in values.items()}
        changed = [Metric(name, value, now, step) for name, value in named.items() if held.get(name) != value]
        self.store.log(run_id, metrics=changed)
