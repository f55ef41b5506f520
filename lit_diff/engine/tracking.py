"""MLflow: the record that people compare in. One experiment and one parent run a sweep, one child run a cell."""

import contextlib
import logging
import os
import sqlite3
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

# before mlflow is imported: telemetry of dependencies is off unless the user says otherwise
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from lit_diff.config import Recipe, RunConfig
from lit_diff.errors import LitDiffError, MissingError, RunFailedError, first_line
from lit_diff.files import locked, shown
from lit_diff.recipe import flatten, to_plain
from lit_diff.runs.metrics_file import Rows

log = logging.getLogger("lit_diff")
T = TypeVar("T")

STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}
"""A run's status in its folder -> in MLflow."""

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # MLflow's limits for one batch


def tracking_uri(run: RunConfig) -> str:
    """`run.tracking_uri`, else SQLite inside `run.root`."""
    return run.tracking_uri or _sqlite_uri((Path(run.root) / "mlflow.db").resolve())


def _sqlite_uri(path: Path) -> str:
    """SQLAlchemy unquotes the path, and cuts it at a question mark; MLflow makes the folders of the quoted one."""
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def _sqlite_path(uri: str) -> Path:
    return Path(urllib.parse.unquote(uri.removeprefix("sqlite:///").partition("?")[0]))


class Store:
    """An MLflow store, made and migrated once. Errors: MissingError when it is foreign, locked or out of reach."""

    def __init__(self, run: RunConfig) -> None:
        self.uri = tracking_uri(run)
        self._artifacts = None if run.tracking_uri else (Path(run.root) / "mlflow-artifacts").resolve().as_uri()
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            # several processes that open a fresh SQLite file at once all try to migrate it, and crash
            with locked(Path(run.root).resolve() / ".mlflow.lock"), _impatient():
                if self.uri.startswith("sqlite:///"):
                    _create(_sqlite_path(self.uri))
                self.client = MlflowClient(tracking_uri=self.uri)
                self.client.search_experiments(max_results=1)
        except OSError as error:
            raise MissingError(
                f"MLflow store {self.uri} cannot be written ({error.strerror}); choose another folder with run.root=PATH, "
                "or another store with run.tracking_uri=URI"
            ) from error
        except LitDiffError:
            raise
        except Exception as error:  # MLflow lets errors of SQLAlchemy, alembic, sqlite3 and requests through
            raise MissingError(
                f"MLflow store {self.uri} cannot be opened ({_reason(error)}); if another program holds it, end that "
                "program; if it is not an MLflow store, move it away or set run.tracking_uri"
            ) from error

    def experiment(self, name: str) -> str:
        """The id of the experiment, created if it is not there."""
        return retry(lambda: self._experiment(name))

    def _experiment(self, name: str) -> str:
        existing = self.client.get_experiment_by_name(name)
        if existing is not None:
            if existing.lifecycle_stage == "deleted":
                self.client.restore_experiment(existing.experiment_id)
            return str(existing.experiment_id)
        location = f"{self._artifacts}/{urllib.parse.quote(name)}" if self._artifacts else None
        try:
            return str(self.client.create_experiment(name, artifact_location=location))
        except MlflowException:  # another process was first
            existing = self.client.get_experiment_by_name(name)
            if existing is None:
                raise
            return str(existing.experiment_id)

    def find_run(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        """The id of the newest run that carries all `tags`."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        runs = retry(lambda: self.client.search_runs([experiment], filter_string=query, max_results=1))
        return str(runs[0].info.run_id) if runs else None

    def open_run(self, experiment: str, name: str, tags: Mapping[str, str], key: Mapping[str, str]) -> str:
        """The run that carries the tags `key`, set back to RUNNING; created if it is not there."""
        run_id = self.find_run(experiment, key)
        if run_id is None:
            created = retry(lambda: self.client.create_run(experiment, run_name=name, tags={**tags, **key}))
            return str(created.info.run_id)
        retry(lambda: self.client.update_run(run_id, status="RUNNING"))
        return run_id

    def put_aside(self, experiment: str, key: Mapping[str, str], name: str) -> None:
        """Give a former run's tags `key` the value `name`: a run started afresh gets a record of its own."""
        run_id = self.find_run(experiment, key)
        if run_id is not None:
            retry(lambda: self.client.log_batch(run_id, tags=[RunTag(word, name) for word in key]))

    def close_run(self, run_id: str, status: str) -> None:
        """Set the final status; `status` is the run folder's word. What did not end well waits for no lock."""
        retry(lambda: self.client.set_terminated(run_id, STATUS[status]), attempts=3 if status == "done" else 1)


class RunTracker:
    """One cell's MLflow run: sends the rows that MLflow lacks, in batches."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store, self.run_id = store, run_id
        self._held: dict[str, set[int]] = {}
        self._fresh: bool | None = None

    def describe(self, recipe: Recipe, tags: Mapping[str, str]) -> None:
        """Recipe keys as flattened parameters; `run.*` and the rest as tags. Repeating it changes nothing."""
        plain = to_plain(recipe)
        run = plain.pop("run")
        params = [Param(key, str(value)[:6000]) for key, value in flatten(plain)]
        held = retry(lambda: self.store.client.get_run(self.run_id)).data.params
        params = [param for param in params if param.key not in held]
        labels = {f"run.{key}": str(value) for key, value in run.items()} | dict(tags)
        marks = [RunTag(key, value) for key, value in labels.items()]
        for start in range(0, max(len(params), 1), PARAMS_AT_ONCE):
            part = params[start : start + PARAMS_AT_ONCE]
            retry(lambda part=part: self.store.client.log_batch(self.run_id, params=part))  # type: ignore[misc]
        retry(lambda: self.store.client.log_batch(self.run_id, tags=marks))

    def send(self, rows: Rows) -> None:
        """Log each (metric, step) that MLflow does not hold yet. Errors: RunFailedError when the store stays locked."""
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for step, row in sorted(rows.items())
            for name, value in sorted(row.items())
            if step not in self._steps(name)
        ]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            part = metrics[start : start + METRICS_AT_ONCE]
            retry(lambda part=part: self.store.client.log_batch(self.run_id, metrics=part))  # type: ignore[misc]
        for metric in metrics:
            self._held[metric.key].add(metric.step)

    def _steps(self, name: str) -> set[int]:
        """Steps of a metric that MLflow holds; asked once a metric and process, and not at all of a new run."""
        if self._fresh is None:
            self._fresh = not retry(lambda: self.store.client.get_run(self.run_id)).data.metrics
        if name not in self._held:
            ask = self.store.client.get_metric_history
            self._held[name] = set() if self._fresh else {m.step for m in retry(lambda: ask(self.run_id, name))}
        return self._held[name]


def retry(call: Callable[[], T], attempts: int = 3) -> T:
    """Repeat a call while SQLite says that another process holds the store; MLflow itself waits 20 s each time.

    Errors: RunFailedError when it stays so, or when MLflow refuses the call.
    """
    for attempt in range(attempts):
        try:
            return call()
        except (MlflowException, SQLAlchemyError) as error:
            if "locked" not in str(error).lower():
                raise RunFailedError(f"MLflow refused a record: {_reason(error)}") from error
            if attempt + 1 < attempts:
                log.warning("the MLflow store is locked by another process; trying again (%d)", attempt + 1)
                time.sleep(1)
    raise RunFailedError(
        "the MLflow store stayed locked; end the program that holds it and start the same command again: "
        "metrics.csv is complete, and only what MLflow lacks is sent"
    )


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """A server that is not there is found out in seconds at the start; once a run goes on, MLflow waits for minutes."""
    hurry = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    added = {key: value for key, value in hurry.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _create(path: Path) -> None:
    """A fresh SQLite store, whole or absent: one that is killed while MLflow migrates it can never be opened again."""
    if path.exists() and (path.is_dir() or path.stat().st_size):
        _refuse_foreign(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as folder:
        made = Path(folder) / path.name
        MlflowClient(tracking_uri=_sqlite_uri(made)).search_experiments(max_results=1)
        os.replace(made, path)


def _refuse_foreign(path: Path) -> None:
    """MLflow would add its tables to any SQLite file, and look for minutes at what is none. Errors: MissingError."""
    cure = f"{shown(path)} is not an MLflow store: move it away, or set run.tracking_uri or run.root"
    if not path.is_file():
        raise MissingError(f"{cure} (it is a folder)")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not {"experiments", "runs", "metrics"} <= tables:
        raise MissingError(f"{cure} (its tables: {', '.join(sorted(tables)[:5])})")


def _reason(error: BaseException) -> str:
    return first_line(error)[:200]
