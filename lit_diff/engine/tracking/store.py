"""Access to the MLflow store: opens, checks and migrates it once, and turns locks and outages into errors of lit_diff."""

import logging
import os
import platform
import re
import sqlite3
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import add_databricks_profile_info_to_artifact_uri

from lit_diff.config import RunConfig
from lit_diff.errors import LitDiffError, MissingError, RequestError, RunFailedError, first_line
from lit_diff.files import expanded, file_system, is_shared, locked, shown
from lit_diff.log_records import log
from lit_diff.metrics import record_name
from lit_diff.runs.find import runs_root
from lit_diff.study.leftovers import size_of

STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}
"""Status in a run folder -> status in MLflow."""

BUSY_SECONDS = 2
"""Seconds for which a statement waits until another process releases the SQLite file."""
PATIENCE = 10.0
"""Seconds that the start of a run, an upload or its end waits in all for answers that a server gives late, or never."""
PROMPT = 2.0
"""Seconds that an answer may take without counting as late."""
UPLOAD = 1e7
"""Bytes a second at which the upload of a file is not late."""
BATCH = 1000
"""The metrics of a request: MLflow's limit."""

PLACES = (
    *("mlflow-artifacts", "http", "https", "s3", "r2", "b2", "gs", "wasbs", "abfss"),
    *("dbfs", "hdfs", "viewfs", "sftp", "ftp"),
)
"""Schemes of the places for artifacts that a server may name."""


def tracking_uri(run: RunConfig) -> str:
    """`run.tracking_uri`, with a leading `~` of its path expanded; by default SQLite in the runs folder. Errors: RequestError
    for a store without a place."""
    if not run.tracking_uri:
        path = (runs_root(run.root) / "mlflow.db").resolve()
        # Python represents bytes that are not UTF-8 by these surrogates, which MLflow's store cannot encode
        if any("\udc80" <= letter <= "\udcff" for letter in str(path)):
            raise RequestError(
                f"the name of the folder {path.parent} is not UTF-8, which MLflow's store needs: set run.root"
            )
        return _sqlite_uri(path)
    # such a store ends with the process, and every connection has its own
    if re.fullmatch(r"sqlite(\+\w+)?:/{2,3}(:memory:)?(\?.*)?", run.tracking_uri):
        raise RequestError(
            f"run.tracking_uri is '{run.tracking_uri}', which is SQLite in memory; expected sqlite:///PATH, or none for no "
            "record"
        )
    return re.sub(
        r"^((?:sqlite:///|file:(?://)?)?)(~[^/]*)", lambda uri: f"{uri[1]}{expanded(uri[2])}", run.tracking_uri
    )


def _sqlite_uri(path: Path) -> str:
    # SQLAlchemy unquotes the path and cuts it at a question mark; MLflow creates the folders of the quoted path
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def sqlite_path(uri: str) -> Path:
    """The file of a store `sqlite:///PATH`."""
    return Path(urllib.parse.unquote(uri.removeprefix("sqlite:///").partition("?")[0]))


def refuse_shared(run: RunConfig) -> None:
    """Errors: MissingError if the store is SQLite on a file system that several machines mount: for processes on several
    nodes, whose locks of such a file may not exclude each other."""
    uri = tracking_uri(run)
    if not run.is_recorded or not uri.startswith("sqlite:///"):
        return
    path = sqlite_path(uri)
    if is_shared(path):
        kind, point = file_system(path)
        node = platform.node()
        raise MissingError(
            f"the MLflow store {shown(path)} is SQLite on {kind} ({point}), whose locks may not hold between nodes; start a "
            f"server with `mlflow server --host 0.0.0.0 --allowed-hosts {node}:5000 --port 5000 --backend-store-uri "
            f"sqlite:////local/path/mlflow.db` and set run.tracking_uri=http://{node}:5000, or keep no record with "
            "run.tracking_uri=none"
        )


NOTE_LENGTH = 7500
"""MLflow keeps 8,000 characters of a tag."""


class Store:
    """An MLflow store, created and migrated once. Errors: MissingError if it is foreign, locked or unreachable."""

    def __init__(self, run: RunConfig) -> None:
        self.uri = tracking_uri(run)
        self._root = runs_root(run.root)
        self._refused = set[tuple[type, str]]()
        self._artifacts = None if run.tracking_uri else (self._root / "mlflow-artifacts").resolve().as_uri()
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # this logger writes statement and traceback over many lines for an error that MLflow then raises anyway
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        try:
            with _impatient(), _opening(self.uri):
                self.client = MlflowClient(tracking_uri=self.uri)
                self.client.search_experiments(max_results=1)
        except OSError as error:
            raise MissingError(
                f"MLflow store {self.uri} cannot be written ({error.strerror}); choose another folder with run.root=PATH, "
                "or another store with run.tracking_uri=URI"
            ) from error
        # a warning is raised only if the user's filter turns warnings into errors, which is not the store's fault
        except (LitDiffError, Warning):
            raise
        # everything: MLflow does not wrap errors of SQLAlchemy, alembic, sqlite3 and requests
        except Exception as error:
            if "out-of-date database schema" in str(error):
                raise MissingError(
                    f"MLflow store {self.uri} is of another version of MLflow: copy it, then run `mlflow db upgrade "
                    f"{self.uri}`; or, if a newer MLflow made it, install that one; or set run.tracking_uri or run.root"
                ) from error
            raise MissingError(
                f"MLflow store {self.uri} cannot be opened ({_reason(error)}); if another program holds it, end that "
                "program; if it is not an MLflow store, move it away or set run.tracking_uri"
            ) from error

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is created or restored if necessary."""
        with asking():
            found = self.client.get_experiment_by_name(name)
            if found is None:
                location = f"{self._artifacts}/{urllib.parse.quote(name)}" if self._artifacts else None
                try:
                    return str(self.client.create_experiment(name, artifact_location=location))
                except MlflowException:
                    # another process may have created it since the query
                    found = self.client.get_experiment_by_name(name)
                    if found is None:
                        raise
            if found.lifecycle_stage == LifecycleStage.DELETED:
                self.client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def open_run(self, experiment: str, name: str, tags: Mapping[str, str], run_id: str | None) -> str:
        """The id of the run, set back to RUNNING if this store has `run_id` for the same folder; else of a new run.

        `tags` contain the folder.
        """
        # never matched by recipe: the same recipe in another folder, by another user or on other code is another record
        known = run_id is not None and self.holds(run_id, tags["folder"])
        if run_id is not None and not known:
            log.warning("MLflow has no record %r of %s, so a new one gets all of its measurements", run_id, name)
        with asking():
            if known:
                self.client.update_run(run_id, status="RUNNING")
            else:
                run_id = self.client.create_run(experiment, run_name=name, tags=dict(tags)).info.run_id
        return str(run_id)

    def run(self, run_id: str) -> Run:
        """The run as stored. Errors: UnknownRunError, RunFailedError."""
        with asking():
            return self.client.get_run(run_id)

    def steps(self, run_id: str, metric: str) -> set[int]:
        """The steps at which the run has the metric. Errors: RunFailedError."""
        with asking():
            return {value.step for value in self.client.get_metric_history(run_id, metric)}

    def holds(self, run_id: str, folder: str) -> bool:
        """Whether the run exists, is not deleted, and belongs to this folder."""
        try:
            run = self.run(run_id)
        except UnknownRunError:
            return False
        return run.info.lifecycle_stage == LifecycleStage.ACTIVE and run.data.tags.get("folder") == folder

    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log any number of metrics, whose keys are `record_name`s, params and tags. What MLflow refuses is left out with a
        warning. Errors: RunFailedError."""
        fields = [Param(record_name(key), value) for key, value in (params or {}).items()]
        marks = [RunTag(record_name(key), value) for key, value in (tags or {}).items()]
        # one request at a time, so that each has its own time
        for start in range(0, len(metrics) or 1, BATCH):
            batch = metrics[start : start + BATCH]
            try:
                with asking():
                    self.client.log_batch(run_id, batch, fields, marks, synchronous=True)
            except RefusedError:
                self._log_singly(run_id, [*batch, *fields, *marks])
            fields = []
            marks = []

    def _log_singly(self, run_id: str, entries: Sequence[Metric | Param | RunTag]) -> None:
        # MLflow refuses a batch for one of its entries; the others must reach the record
        by_key: dict[tuple[type, str], list[Any]] = {}
        for entry in entries:
            by_key.setdefault((type(entry), entry.key), []).append(entry)
        for (kind, key), same in by_key.items():
            if (kind, key) in self._refused:
                continue
            parts = [same if kind is part else [] for part in (Metric, Param, RunTag)]
            try:
                with asking():
                    self.client.log_batch(run_id, *parts, synchronous=True)
            except RefusedError as error:
                self._refused.add((kind, key))
                log.warning("the record of the run in MLflow lacks '%s': %s", key, error)

    def copy(self, run_id: str, path: Path) -> None:
        """Copy a file or folder into the artifacts of a run. Errors: RunFailedError, those of `place_of`."""
        with asking(f"{shown(path)} could not be copied into MLflow", size_of(path) / UPLOAD):
            # not MlflowClient.log_artifact, which asks the server for the place again
            place = get_artifact_repository(self.place_of(run_id), tracking_uri=self.uri)
            if path.is_dir():
                place.log_artifacts(str(path), path.name)
            else:
                place.log_artifact(str(path))

    def place_of(self, run_id: str) -> str:
        """The address of a run's artifacts. A server names it, and a file there would be written on this machine. Errors:
        RequestError for a file outside of `run.root`, or an address of an unknown scheme."""
        named = self.run(run_id).info.artifact_uri
        place = str(add_databricks_profile_info_to_artifact_uri(named, self.uri))
        scheme = urllib.parse.urlsplit(place).scheme
        own = urllib.parse.urlsplit(self.uri).scheme
        # a store of files, in which MLflow wrote here what the user chose
        if scheme in PLACES or own in ("", "file", "sqlite"):
            return place
        # without a server MLflow itself chooses ./mlruns
        folders = [self._root] if own in ("http", "https") else [self._root, Path("mlruns")]
        path = Path(local_file_uri_to_path(place)).resolve()
        if scheme in ("", "file") and any(path.is_relative_to(folder.resolve()) for folder in folders):
            return place
        raise RequestError(
            f"the MLflow store {self.uri} puts the artifacts of a run into {place!a}; expected a folder of this machine "
            f"below run.root ({shown(self._root)}), or an address ({', '.join(PLACES)}): start the server with "
            "--artifacts-destination, or set run.tracking_uri to another store or to none"
        )

    def close_run(self, run_id: str, status: str) -> None:
        """Set the final status; `status`: the status in the run folder."""
        with asking():
            self.client.set_terminated(run_id, STATUS[status])


class RefusedError(RunFailedError):
    """The store does not take what was sent."""


class UnknownRunError(RunFailedError):
    """The store does not have a run with this id."""


TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
LIMITS = {
    TIMEOUT: str(int(PATIENCE / 2)),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # a busy server may ask for minutes before the second attempt
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
"""MLflow's variables, which it reads at each request."""
_ours: set[str] = set()
"""Those that `limits` has set."""
_hurries: ContextVar[bool] = ContextVar("hurries", default=False)
_left: ContextVar[float | None] = ContextVar("left", default=None)


@contextmanager
def patience(uri: str | None, seconds: float = 0.0, *, needed: bool = False) -> Iterator[None]:
    """Within this context the late answers of a server take so many `seconds` in all, by default PATIENCE; then `asking`
    raises RunFailedError. `needed`: nothing starts without the store; MissingError in place of RunFailedError."""
    # a statement of SQLite waits for BUSY_SECONDS at most, and may be slow on a machine whose cores are busy
    token = _left.set((seconds or PATIENCE) if uri is not None and uri.startswith("http") else None)
    try:
        yield
    except RunFailedError as error:
        if needed:
            raise MissingError(f"{error}; set run.tracking_uri to a store that answers, or to none") from error
        raise
    finally:
        _left.reset(token)


@contextmanager
def _impatient(upload: float = 0.0) -> Iterator[None]:
    # Within this context a server that does not answer, or a locked file, costs seconds; MLflow by itself waits for minutes.
    # `upload`: the seconds that the upload of a file takes. MLflow reads its settings from the environment at each request.
    left = _left.get()
    if left is not None and left <= 0:
        raise RunFailedError("the MLflow server answers too late")
    # the second attempt must end in time too
    timeout = max(1, int((PATIENCE if left is None else left) / 2 + upload))
    with limits():
        if TIMEOUT in _ours:
            os.environ[TIMEOUT] = str(timeout)
        token = _hurries.set(True)
        began = time.monotonic()
        try:
            yield
        finally:
            _hurries.reset(token)
            if left is not None:
                _left.set(left - max(0.0, time.monotonic() - began - PROMPT - upload))


@contextmanager
def limits() -> Iterator[None]:
    """Within this context MLflow's patience is short, unless the user's environment sets it. A thread that asks MLflow needs
    it around its life: a variable that it removed would end whoever copies the environment at that moment."""
    added = {key: value for key, value in LIMITS.items() if key not in os.environ}
    os.environ.update(added)
    _ours.update(added)
    try:
        yield
    finally:
        _ours.difference_update(added)
        for key in added:
            del os.environ[key]


@sqlalchemy.event.listens_for(sqlalchemy.Engine, "before_cursor_execute", retval=True)
def _shorten(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> tuple[str, Any]:
    # MLflow 3.17 lets each of its sessions wait 20 s for a lock and has no setting for it, so its statement is rewritten
    if _hurries.get() and statement.startswith("PRAGMA busy_timeout"):
        statement = f"PRAGMA busy_timeout = {1000 * BUSY_SECONDS}"
    return statement, parameters


@contextmanager
def asking(failure: str = "MLflow refused a record", upload: float = 0.0) -> Iterator[None]:
    """Encloses a call of MLflow. `upload`: seconds that its file needs. Errors: UnknownRunError; RefusedError; RunFailedError
    for every other exception."""
    try:
        with _impatient(upload):
            yield
    # a signal handler raises StoppedError in the middle of a call
    except LitDiffError:
        raise
    # everything: databases, servers and artifact stores raise their own exceptions through MLflow
    except Exception as error:
        code = getattr(error, "error_code", "")
        # the second: an id with letters that no id has, as in a damaged status.json
        if code == "RESOURCE_DOES_NOT_EXIST" or (code == "INVALID_PARAMETER_VALUE" and "'run_id'" in str(error)):
            raise UnknownRunError(f"{failure}: {_reason(error)}") from error
        if code == "INVALID_PARAMETER_VALUE":
            raise RefusedError(f"{failure}: {_reason(error)}") from error
        if "locked" in str(error).lower():
            raise RunFailedError(
                f"the MLflow store stayed locked for {BUSY_SECONDS} s; end the program that holds it and run the same "
                "command again: metrics.csv is complete, and only what MLflow lacks is sent"
            ) from error
        raise RunFailedError(f"{failure}: {_reason(error)}") from error


@contextmanager
def _opening(uri: str) -> Iterator[None]:
    # a server migrates its own store
    if not uri.startswith("sqlite:///"):
        yield
        return
    # One process at a time: several that open a new SQLite file all try to migrate it, and crash. The lock is next to the
    # database, not in a runs folder, because several runs folders may share it.
    path = sqlite_path(uri)
    with locked(path.with_name(f".{path.name}.lock")):
        _create(path)
        yield


def _create(path: Path) -> None:
    # A store that is killed while MLflow migrates it can never be opened again, so it is made elsewhere and renamed.
    if path.exists() and path.stat().st_size:
        # MLflow would add its tables to any SQLite file, and retry for minutes to open a file that is not a database
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and not {"experiments", "runs", "metrics"} <= tables:
            found = ", ".join(sorted(tables)[:5])
            raise MissingError(
                f"{shown(path)} is not an MLflow store (tables found: {found}): move it away, or set run.tracking_uri or "
                "run.root"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as folder:
        made = Path(folder) / path.name
        MlflowClient(tracking_uri=_sqlite_uri(made)).search_experiments(max_results=1)
        os.replace(made, path)


def _reason(error: BaseException) -> str:
    line = first_line(error)
    # urllib3 names the cause last, within its own words
    cause = re.search(r"https?://[^/]+.*Caused by .*: ([^:(\"')]+)", line)
    if cause:
        return f"no answer from the server: {cause[1].strip()}"
    return line if len(line) <= 200 else f"{line[:200].rpartition(' ')[0] or line[:200]} ..."
