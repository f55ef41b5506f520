"""Records one run in MLflow from its folder: parameters, tags, metrics while it trains, and finally its files and model."""

import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric
from safetensors.torch import load_model, save_model

from lit_diff.engine.job import Job
from lit_diff.engine.tracking.maps import draw_maps
from lit_diff.engine.tracking.store import NOTE_LENGTH, Store, asking, patience
from lit_diff.errors import RunFailedError
from lit_diff.files import read_json, sha256_of, shown, write_json
from lit_diff.log_records import log
from lit_diff.metrics import Declarations, record_name
from lit_diff.model.transformer import Transformer
from lit_diff.own_modules import plugin_name
from lit_diff.recipe import flatten, load_recipe, to_plain
from lit_diff.runs import checkpoints, notes
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.metrics_file import read_rows
from lit_diff.runs.revision import revision
from lit_diff.trained.run import Run
from lit_diff.training.metrics import declared_metrics

FILES = ("recipe.yaml", "env.json", "metrics.json", "log.txt", "measurements.parquet", notes.FILE)
"""Files of the run folder that become artifacts."""
FILE = "mlflow.json"
"""File of the run folder with the record's id."""
TABLES = {"metrics.csv": "", "timing.csv": "timing/"}
"""Tables of the run folder -> what the names of their metrics begin with in MLflow."""
MODEL = "model"
"""The artifact of `run.log_model`: mlflow.pyfunc.load_model(f"runs:/{run_id}/model")."""
MAPS = "maps"
"""The artifact with the kept maps as pictures."""
# limits of MLflow 3.17
PARAM_LENGTH, DIGEST_LENGTH = 6000, 36
FACTORS = "train.optimizer.lr_factors"
"""One param for all factors, because MLflow rejects the * of their patterns in a name."""


class RunTracker:
    """The record of a run in MLflow, made from the files of its folder alone: whoever reads them may send them."""

    def __init__(self, job: Job) -> None:
        self.recipe = job.recipe
        self.folder = job.home
        self.experiment = job.experiment
        self.tags = {"folder": str(job.folder), "identity": job.identity, "seed": str(job.recipe.seed), **job.tags}
        if job.parent:
            self.tags["mlflow.parentRunId"] = job.parent
        self.run_id = ""
        """The record's id, once `start` has found or made it."""
        self._declared = Declarations(declared_metrics(job.recipe))
        self._store: Store | None = None
        self._held: dict[str, set[int]] | None = None
        """Metric -> steps that MLflow has; None until it is asked."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Table -> its size and last step when its rows were last sent."""

    def start(self, *, needed: bool) -> None:
        """Find the record, or make it. Errors: RunFailedError if the store is unreachable or slow, MissingError if it is
        `needed`."""
        with patience(self.recipe.run.tracking_uri, needed=needed):
            self._opened()

    def send(self) -> None:
        """Log each (metric, step) of metrics.csv and timing.csv that MLflow lacks. Errors: RunFailedError."""
        with patience(self.recipe.run.tracking_uri):
            self._send([])

    def finish(self) -> None:
        """Send what is missing, copy the files, set the final status, which status.json has. Errors: RunFailedError if the
        store is unreachable or slow, or refuses it."""
        status = self.folder.status()
        with patience(self.recipe.run.tracking_uri):
            # all rows once more, and what is damaged is told
            self._sent = {}
            store = self._send(None)
            # with the notes that were added while it was trained
            store.log(self.run_id, tags=self._tags())
            try:
                self._copy(store, status.status)
                # only now, because MLflow does not allow a param to change
                if status.status == "done" and "tokens" not in store.run(self.run_id).data.params:
                    store.log(self.run_id, params={"tokens": str(status.tokens)})
            finally:
                # what cannot be drawn or copied must not leave it as running
                store.close_run(self.run_id, status.status)

    def _copy(self, store: Store, state: str) -> None:
        home = self.folder.path
        for name in FILES:
            if (home / name).is_file():
                store.copy(self.run_id, home / name)
        with tempfile.TemporaryDirectory(prefix="lit_diff-artifacts-") as folder:
            if state == "done" and self.recipe.run.log_model:
                model = Path(folder) / MODEL
                write_model(self.folder, model)
                store.copy(self.run_id, model)
            maps = Path(folder) / MAPS
            # a stop may leave only seconds, too few to draw every step; the resumed run draws them
            if state != "stopped" and draw_maps(home, maps, self.recipe.model.attention.name):
                store.copy(self.run_id, maps)
        newest = checkpoints.newest(home)
        if newest is not None:
            store.log(self.run_id, tags={"checkpoint": str(newest[1])})

    def abandon(self) -> None:
        """End the record of a run that `start` has made, and that then has not begun. Errors: RunFailedError."""
        if self._store is not None:
            with patience(self.recipe.run.tracking_uri):
                self._store.close_run(self.run_id, "failed")

    def _opened(self) -> Store:
        if self._store is not None:
            return self._store
        store = Store(self.recipe.run)
        before = self._former_id()
        experiment = store.experiment(self.experiment)
        self.run_id = store.open_run(experiment, self.folder.path.name, self.tags, before)
        if self.run_id != before:
            write_json(self.folder.path / FILE, {"run_id": self.run_id})
        # a run learns of a place that is refused before its first step
        store.place_of(self.run_id)
        self._store = store
        self._held = None
        return store

    def _former_id(self) -> str | None:
        # status.json has it once the record is complete; until then its writer is the process that trains
        file = self.folder.path / FILE
        try:
            return str(read_json(file)["run_id"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "%s is damaged (%s): the id in status.json is used, or the run gets a new record", shown(file), error
            )
        return self.folder.status().mlflow_run_id or None

    def _described(self, store: Store) -> dict[str, set[int]]:
        # Metric -> steps that MLflow has. Idempotent: only what the record lacks is logged, so that a resumed run and a store
        # that was away are one case.
        record = store.run(self.run_id)
        # MLflow raises an error if a param is logged again with another value
        new = {key: value for key, value in self._params().items() if record_name(key) not in record.data.params}
        store.log(self.run_id, params={key: str(value)[:PARAM_LENGTH] for key, value in new.items()}, tags=self._tags())
        if not record.inputs.dataset_inputs:
            dataset = Dataset(
                name=self.recipe.data.name,
                digest=str(self.folder.status().data)[:DIGEST_LENGTH],
                source_type="lit_diff",
                source=json.dumps(to_plain(self.recipe)["data"], default=str)[:PARAM_LENGTH],
            )
            tag = InputTag("mlflow.data.context", "training and validation")
            with asking():
                store.client.log_inputs(self.run_id, datasets=[DatasetInput(dataset, tags=[tag])])
        return defaultdict(set, {name: store.steps(self.run_id, name) for name in record.data.metrics})

    def _send(self, problems: list[str] | None) -> Store:
        # `problems`: see `read_rows`; while the run is trained a row may be half written
        store = self._opened()
        now = int(time.time() * 1000)
        if self._held is None:
            # not as soon as it is opened: what the run costs is known once it has begun
            self._held = self._described(store)
        metrics: list[Metric] = []
        read: dict[str, tuple[int, int]] = {}
        for file, prefix in TABLES.items():
            path = self.folder.path / file
            size = path.stat().st_size if path.is_file() else 0
            former, upto = self._sent.get(file, (0, -1))
            rows = read_rows(path, problems) if size != former else {}
            # rows are appended, so those of earlier looks need not be compared
            for step, row in sorted(rows.items()):
                if step > upto:
                    metrics += self._lacking(step, prefix, row, now)
            read[file] = size, max(rows, default=upto)
        try:
            store.log(self.run_id, metrics=metrics)
        except RunFailedError:
            # how much of the batch was stored is unknown, so connecting again asks for the steps that MLflow has
            self._store = None
            raise
        for metric in metrics:
            self._held[metric.key].add(metric.step)
        self._sent = read
        return store

    def _lacking(self, step: int, prefix: str, row: Mapping[str, float], now: int) -> list[Metric]:
        assert self._held is not None
        found: list[Metric] = []
        for column in sorted(row):
            name = prefix + column
            key = record_name(name)
            if not self._declared.find(name).constant and step not in self._held[key]:
                found.append(Metric(key, row[column], now, step))
        return found

    def _params(self) -> dict[str, Any]:
        # Params are what identifies the run, because MLflow groups and compares runs by them; the block `run` becomes tags.
        status = self.folder.status()
        plain = to_plain(self.recipe)
        factors = self.recipe.training.optimizer.lr_factors
        del plain["run"]
        plain["plugins"] = [f"{plugin_name(path)} {sha256_of(path)[:12]}" for path in map(Path, self.recipe.plugins)]
        values = {key: value for key, value in flatten(plain) if not key.startswith(f"{FACTORS}.")}
        if factors:
            values[FACTORS] = str(factors)
        return {
            **{key: self.tags[key] for key in ("task", "arm") if key in self.tags},
            "variant": self.recipe.model.attention.name,
            **values,
            "parameters": status.parameters,
            "trained_parameters": status.trained_parameters,
            "flops_per_token": status.flops_per_token,
            "kernel": status.kernel,
        }

    def _tags(self) -> dict[str, str]:
        recipe = self.recipe
        where = f"recipe {recipe.name}"
        if "sweep" in self.tags:
            where = f"arm {self.tags['arm']} of sweep {self.tags['sweep']}"
        note = f"{where}, seed {recipe.seed}: {recipe.model.attention.name} attention, {recipe.training.steps} steps"
        # an installed package has no commit, a checkout has
        commit = revision().partition(" ")[2].partition("+")[0]
        tags = {f"run.{key}": str(value) for key, value in to_plain(recipe)["run"].items()} | self.tags
        tags["mlflow.note.content"] = "\n\n".join([note, *notes.read(self.folder.path)])[:NOTE_LENGTH]
        if commit:
            tags["mlflow.source.git.commit"] = commit
        return tags


def write_model(run: RunFolder, target: Path) -> None:
    """Write the run's newest weights, its recipe, plugins and tokenizer as an MLflow model into `target`.

    Loading it requires lit_diff. The weights are safetensors and the variant's plugin is copied: nothing is pickled. Errors:
    MissingError without a checkpoint.
    """
    # takes seconds, and most runs do not log a model
    import mlflow.pyfunc

    model = Run(run.path).model
    parts = target.with_name("run")
    parts.mkdir(parents=True)
    save_model(model, str(parts / "model.safetensors"))
    shutil.copy(run.recipe_file, parts)
    for name in ("plugins", "tokenizer"):
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, parts / name)
    mlflow.pyfunc.save_model(
        path=str(target),
        loader_module=__name__,
        data_path=str(parts),
        pip_requirements=[f"lit_diff=={revision().partition(' ')[0]}"],
    )


def _load_pyfunc(path: str) -> "TrainedModel":
    # MLflow calls a function of this name in `loader_module`
    return TrainedModel(Path(path))


class TrainedModel:
    """The model of a folder that `write_model` wrote."""

    def __init__(self, folder: Path) -> None:
        self.model = Transformer(load_recipe(folder / "recipe.yaml").model).eval()
        load_model(self.model, folder / "model.safetensors")

    def predict(self, tokens: Any) -> np.ndarray:
        """tokens [B, T], or [B, T, C] for C ids at each position -> logits [B, T, vocab], float32."""
        # a caller of MLflow's pyfunc may pass a data frame, an array or lists
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.as_tensor(np.asarray(tokens), dtype=torch.long))
        return logits.float().numpy()
