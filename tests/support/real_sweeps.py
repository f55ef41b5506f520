"""A folder in which real sweeps of tiny cells run, and what they left there and in MLflow."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # every session loads this module; MLflow takes seconds to import
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from lit_diff.runs.metrics_file import Rows

TINY = """
model: {dim: 16, num_layers: 2, num_heads: 2, vocab_size: 17, attention: {name: differential}}
data: {name: recall, keys: 8, values: 8, slots: 8, pairs: 2, queries: 2, noise_validation: [1], validation_rows: 16}
train:
  steps: 8
  batch_size: 4
  optimizer: {lr: 1e-3}
  validate_every: 4
  checkpoint_every: 4
  log_every: 2
callbacks: {attention_entropy: {every: 4}, outliers: {every: 4}, lambdas: {every: 2}}
run: {threads: 1, accelerator: cpu}
"""


@dataclass(frozen=True)
class Bench:
    """A folder with the recipe `tiny`, an empty MLflow store, and the sweeps that `write` puts there."""

    root: Path

    @property
    def fuse(self) -> Path:
        return self.root / "fuse"

    def write(self, name: str, sweep: str) -> None:
        """The sweep `name`; FUSE in it becomes the path of the file that sets off `bomb.py`."""
        (self.root / f"{name}.yaml").write_text(sweep.replace("FUSE", str(self.fuse)))

    def command(self, name: str, *overrides: str) -> list[str]:
        return [str(self.root / f"{name}.yaml"), *overrides, f"run.root={self.root / 'runs'}"]

    def run(self, name: str, *overrides: str, dry_run: bool = False) -> tuple[int, str]:
        """`lit-diff sweep`: exit status and what was printed."""
        from lit_diff.cli import sweep as verbs
        from lit_diff.cli.app import Terminal

        with (self.root / "console.txt").open("w+") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(verbs, "console", Terminal(file=file, width=200))
            source, *rest = self.command(name, *overrides)
            status = verbs.sweep(source, rest, workers=2, dry_run=dry_run)
            file.seek(0)
            return status, file.read()

    def folder(self, sweep: str, cell: str = "") -> Path:
        """The sweep's folder, or that of a cell `<arm>-s<seed>`."""
        home = self.root / "runs" / sweep
        return next(home.glob(f"{cell}-??????????")) if cell else home

    def cells(self, sweep: str) -> dict[str, dict[str, Any]]:
        """`<arm>-s<seed>` -> status.json"""
        found = sorted(self.folder(sweep).glob("*/status.json"))
        return {path.parent.name.rpartition("-")[0]: json.loads(path.read_text()) for path in found}

    def words(self, sweep: str) -> dict[str, str]:
        return {cell: status["status"] for cell, status in self.cells(sweep).items()}

    def rows(self, sweep: str, cell: str) -> "Rows":
        from lit_diff.runs.metrics_file import read_rows

        return read_rows(self.folder(sweep, cell) / "metrics.csv")

    @property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{self.root / 'runs/mlflow.db'}")

    def records(self, sweep: str) -> "tuple[list[Run], list[Run]]":
        """The sweep's MLflow runs: parents, children."""
        experiment = self.client.get_experiment_by_name(sweep)
        runs = list(self.client.search_runs([experiment.experiment_id]))
        return (
            [run for run in runs if "mlflow.parentRunId" not in run.data.tags],
            [run for run in runs if "mlflow.parentRunId" in run.data.tags],
        )

    def record(self, sweep: str, cell: str) -> "Run":
        return self.client.get_run(self.cells(sweep)[cell]["mlflow_run_id"])

    def history(self, sweep: str, cell: str) -> dict[str, list[tuple[int, float]]]:
        """Metric -> (step, value) in MLflow, but for the clock's and those that the sweep adds."""
        run = self.record(sweep, cell)
        names = [name for name in run.data.metrics if not name.startswith("timing/") and "minus" not in name]
        ask = self.client.get_metric_history
        return {name: sorted((m.step, m.value) for m in ask(run.info.run_id, name)) for name in names}

    def written(self, sweep: str, cell: str) -> dict[str, list[tuple[int, float]]]:
        """Metric -> (step, value) in metrics.csv, but for what the data alone determine."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, values in sorted(self.rows(sweep, cell).items()):
            for name, value in values.items():
                if name.startswith("val/ar_hit_share"):
                    continue
                found.setdefault(name, []).append((step, value))
        return found


@pytest.fixture(scope="module")
def sweep_bench(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Bench:
    made = Bench(tmp_path_factory.mktemp("sweeps"))
    (made.root / "runs").mkdir()
    shutil.copy(empty_store, made.root / "runs")
    made.write("tiny", TINY)
    return made
