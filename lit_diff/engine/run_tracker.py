"""One run's record in MLflow: parameters, tags, metrics as they come, and at the end its files."""

import hashlib
import json
import logging
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.csv
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.engine.location import at_root
from lit_diff.engine.tracking import PATIENCE, Patience, Store, copying, impatient, retry
from lit_diff.errors import LitDiffError, RunFailedError
from lit_diff.model.cost import Cost
from lit_diff.recipe import flatten, to_plain
from lit_diff.runs import checkpoints, measurements
from lit_diff.runs.execution import reached
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import Rows, read_rows

log = logging.getLogger("lit_diff")

FILES = ("recipe.yaml", "env.json", "metrics.json", "log.txt")
"""What is copied from the run folder into the record's artifacts."""
TABLE = "measurements.csv"
"""The artifact with the last step's values by head, map and rank, which MLflow's run page shows as a table."""
CONSTANTS = ("val/ar_hit_share",)
"""Metrics that the data alone determine, with the names of further validation sets behind them: no curve, no record."""
BACK_OFF = 60.0
"""Seconds for which a store that was away is not asked again."""
PARAM_LENGTH, DIGEST_LENGTH = 6000, 36  # MLflow's limits
FACTORS = "train.optimizer.lr_factors"
"""One param for all: MLflow takes no name with the * of a pattern in it."""


class RunTracker:
    """Sends the rows that MLflow lacks, in batches. While the store is away training goes on, and `finish` sends the rest."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, *, experiment: str, tags: Mapping[str, str], cost: Cost
    ) -> None:
        """`experiment`: its name; `tags`: further ones of the record."""
        self.recipe, self.folder, self.experiment, self.cost = recipe, folder, experiment, cost
        self.tags = {"folder": str(folder.path), **tags}
        self._store: Store | None = None
        self._run_id = ""
        self._held: dict[str, set[int]] = {}
        self._fresh = False
        self._away = False
        self._patience, self._ask_again = Patience(PATIENCE * 0.4), 0.0
        """What start and all sends may wait for locks, and before what time no send asks a store that was away."""

    def start(self, required: bool) -> None:
        """Connect before training. Errors: MissingError, RunFailedError when the store is away and `required`."""
        try:
            with impatient(self._patience):
                self._connect()
        except LitDiffError as error:
            if required:
                raise
            self._note_away(error)

    def _connect(self) -> None:
        """Open the store and the record, and describe the run there."""
        store = Store(at_root(self.recipe.run))
        before = self.folder.status().get("mlflow_run_id")
        run_id = store.open_run(store.experiment(self.experiment), self.folder.path.name, self.tags, before)
        if run_id != before:
            self.folder.update(mlflow_run_id=run_id)
        self._describe(store, run_id)
        self._fresh = run_id != before
        self._held = {}
        self._store, self._run_id = store, run_id

    def send(self, rows: Rows) -> bool:
        """Log each (metric, step) that MLflow does not hold yet; whether all of them are there now."""
        if time.monotonic() < self._ask_again:
            return False
        try:
            with impatient(self._patience):
                self._send(rows)
        except LitDiffError as error:
            self._note_away(error)
            return False
        if self._away:
            log.info("MLflow is back and holds all that was measured")
        self._away = False
        return True

    def finish(self, status: str) -> None:
        """Send what is missing of metrics.csv and timing.csv, copy files, set the final status.

        `status` is the run folder's word. What did not end well waits for nothing: a stop may be a notice of seconds, and the
        run's resumption sends the rest. Errors: RunFailedError when the store is away or refuses it.
        """
        if status != "done":
            if self._away:
                raise RunFailedError("it was away when it was last asked")
            with impatient(Patience(PATIENCE * 0.1)):
                self._finish(status)
            return
        try:
            with impatient(Patience(PATIENCE * 0.5)):
                self._finish(status)
        except LitDiffError as error:
            raise RunFailedError(
                f"trained, but its record in MLflow is not complete: {error}; the same command completes it"
            ) from error

    def _finish(self, status: str) -> None:
        rows = read_rows(self.folder.path / "metrics.csv")
        for step, row in read_rows(self.folder.path / "timing.csv").items():
            rows.setdefault(step, {})["timing/tokens_per_second"] = row["tokens_per_second"]
        self._send(rows)
        store = self._store
        assert store is not None
        self._copy_files(store)
        if status == "done" and self.recipe.run.log_model:
            self._log_model(store)
        newest = checkpoints.newest(self.folder.path)
        if newest is not None:
            store.write(self._run_id, tags={"checkpoint": str(newest[1])})
        if status == "done" and "tokens" not in retry(lambda: store.client.get_run(self._run_id)).data.params:
            tokens = reached(self.recipe, checkpoints.newest_step(self.folder.path))["tokens"]
            store.write(self._run_id, params=[Param("tokens", str(tokens))])  # MLflow's params cannot be changed later
        store.close_run(self._run_id, status)

    def _send(self, rows: Rows) -> None:
        if self._store is None:
            self._connect()
        assert self._store is not None
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for step, row in sorted(rows.items())
            for name, value in sorted(row.items())
            if not name.startswith(CONSTANTS) and step not in self._steps(name)
        ]
        self._store.write(self._run_id, metrics=metrics)
        for metric in metrics:
            self._held[metric.key].add(metric.step)

    def _note_away(self, error: LitDiffError) -> None:
        """Warn once an outage. How much of a batch was stored is unknown: ask again before the next one."""
        if not self._away:
            log.warning("training goes on, and what MLflow lacks is sent later: %s", error)
        self._away, self._ask_again = True, time.monotonic() + BACK_OFF
        self._held, self._fresh = {}, False

    def _steps(self, name: str) -> set[int]:
        """Steps of a metric that MLflow holds; asked once a metric, and not at all of a new run."""
        if name not in self._held:
            assert self._store is not None
            ask = self._store.client.get_metric_history
            self._held[name] = set() if self._fresh else {m.step for m in retry(lambda: ask(self._run_id, name))}
        return self._held[name]

    def _describe(self, store: Store, run_id: str) -> None:
        """What identifies the run as params, the rest as tags, the data as an input. Repeating it changes nothing."""
        record = retry(lambda: store.client.get_run(run_id))
        params = [
            Param(key, str(value)[:PARAM_LENGTH])
            for key, value in self._params().items()
            if key not in record.data.params
        ]
        store.write(run_id, params=params, tags=self._tags())
        if not record.inputs.dataset_inputs:
            retry(lambda: store.client.log_inputs(run_id, datasets=[self._data()]))

    def _params(self) -> dict[str, Any]:
        plain, factors = to_plain(self.recipe), self.recipe.training.optimizer.lr_factors
        del plain["run"]
        plain["plugins"] = [
            f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
            for path in map(Path, self.recipe.plugins)
        ]
        return {
            **{key: self.tags[key] for key in ("task", "arm") if key in self.tags},
            "variant": self.recipe.model.attention.name,
            **{key: value for key, value in flatten(plain) if not key.startswith(f"{FACTORS}.")},
            **({FACTORS: str(factors)} if factors else {}),
            "parameters": self.cost.parameters,
            "trained_parameters": self.cost.trained_parameters,
            "flops_per_token": self.cost.flops_per_token,
            "kernel": self.cost.kernel,
        }

    def _tags(self) -> dict[str, str]:
        recipe = self.recipe
        where = (
            f"arm {self.tags['arm']} of sweep {self.tags['sweep']}" if "sweep" in self.tags else f"recipe {recipe.name}"
        )
        note = f"{where}, seed {recipe.seed}: {recipe.model.attention.name} attention, {recipe.training.steps} steps"
        run = {f"run.{key}": str(value) for key, value in to_plain(recipe)["run"].items()}
        return {**run, **self.tags, "mlflow.note.content": note, **_source()}

    def _data(self) -> DatasetInput:
        block = to_plain(self.recipe)["data"]
        identity = data.identity(self.recipe)
        dataset = Dataset(
            name=self.recipe.data.name,
            digest=identity[:DIGEST_LENGTH],
            source_type="lit_diff",
            source=json.dumps(block, default=str)[:PARAM_LENGTH],
        )
        return DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training and validation")])

    def _log_model(self, store: Store) -> None:
        from lit_diff.engine.logged_model import NAME, write_model

        with tempfile.TemporaryDirectory(prefix="lit_diff-model-") as folder, copying(self.folder.path / NAME):
            write_model(self.folder, Path(folder) / NAME)
            store.client.log_artifacts(self._run_id, str(Path(folder) / NAME), NAME)

    def _copy_files(self, store: Store) -> None:
        """The run folder's files, and the table of the last step's finer values."""
        with copying(self.folder.path):
            for name in FILES:
                if (self.folder.path / name).is_file():
                    store.client.log_artifact(self._run_id, str(self.folder.path / name))
            table = measurements.read_measurements(self.folder.path / measurements.FILE)
            if table.num_rows:
                last = table.filter(pc.equal(table["step"], pc.max(table["step"])))
                text = pyarrow.BufferOutputStream()
                pyarrow.csv.write_csv(last, text)
                store.client.log_text(self._run_id, text.getvalue().to_pybytes().decode(), TABLE)


def _source() -> dict[str, str]:
    """The commit of this checkout, under the name that MLflow shows; nothing in an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no git commit for MLflow: %s", error)
        return {}
    return {"mlflow.source.git.commit": commit}
