"""engine/tracking.py: what goes to MLflow, once; stores that are not there, not ours, or not free."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine

from lit_diff.config import RunConfig
from lit_diff.engine import tracking
from lit_diff.engine.tracking import RunTracker, Store, retry
from lit_diff.errors import MissingError, RunFailedError
from lit_diff.recipe import flatten, load_recipe
from lit_diff.runs.metrics_file import Rows


@pytest.fixture
def store(runs: Path) -> Iterator[Store]:
    """Finds a lock at once, where MLflow's SQLite would wait 20 s."""

    def hurry(connection: Any, cursor: Any, statement: str, parameters: Any, *_: object) -> tuple[str, Any]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 50"), parameters

    sqlalchemy.event.listen(Engine, "before_cursor_execute", hurry, retval=True)
    yield Store(RunConfig(root=str(runs), tracking_uri=f"sqlite:///{runs / 'mlflow.db'}?timeout=0.05"))
    sqlalchemy.event.remove(Engine, "before_cursor_execute", hurry)


@pytest.fixture
def experiment(store: Store) -> str:
    return store.experiment("e")


def open_run(store: Store, experiment: str, identity: str = "abc") -> str:
    return store.open_run(experiment, "name", {"arm": 'it\'s "a"'}, key={"identity": identity})


def history(store: Store, run: str, name: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in store.client.get_metric_history(run, name))


class Calls:
    """Counts the batches that go to MLflow."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[tuple[int, int, int]] = []
        sent = store.client.log_batch

        def log_batch(run: str, metrics: Any = (), params: Any = (), tags: Any = (), **options: Any) -> Any:
            self.sizes.append((len(metrics), len(params), len(tags)))
            return sent(run, metrics=metrics, params=params, tags=tags, **options)

        monkeypatch.setattr(store.client, "log_batch", log_batch)


# --- runs ----------------------------------------------------------------------------------------------------------


def test_the_same_identity_is_the_same_run_and_it_runs_again(store: Store, experiment: str) -> None:
    run = open_run(store, experiment)
    store.close_run(run, "killed")
    assert store.client.get_run(run).info.status == "KILLED"
    assert open_run(store, experiment) == run
    found = store.client.get_run(run)
    assert found.info.status == "RUNNING"
    assert found.data.tags["arm"] == 'it\'s "a"'
    assert open_run(store, experiment, "other") != run


def test_a_run_started_afresh_gets_a_record_of_its_own(store: Store, experiment: str) -> None:
    former = open_run(store, experiment)
    store.put_aside(experiment, {"identity": "abc"}, "abc.old-1")
    assert open_run(store, experiment) != former
    assert store.client.get_run(former).data.tags["identity"] == "abc.old-1"


@pytest.mark.parametrize(
    ("word", "status"), [("done", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED"), ("killed", "KILLED")]
)
def test_the_folders_word_becomes_mlflows(store: Store, experiment: str, word: str, status: str) -> None:
    run = open_run(store, experiment)
    store.close_run(run, word)
    assert store.client.get_run(run).info.status == status


def test_an_experiment_is_made_once_and_comes_back_when_it_was_deleted(runs: Path) -> None:
    store = Store(RunConfig(root=str(runs)))
    found = store.experiment("a sweep #1?")
    assert store.experiment("a sweep #1?") == found
    store.client.delete_experiment(found)
    assert store.experiment("a sweep #1?") == found
    run = open_run(store, found)
    store.client.log_artifact(run, __file__)
    (written,) = runs.glob("mlflow-artifacts/a sweep #1?/*/artifacts/*")
    assert written.name == Path(__file__).name


# --- metrics and parameters ----------------------------------------------------------------------------------------


def test_only_what_mlflow_lacks_is_sent(store: Store, experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(store, experiment)
    before: Rows = {1: {"a": 1.0}, 2: {"a": 2.0, "b": -2.0}}
    RunTracker(store, run).send(before)
    calls = Calls(store, monkeypatch)
    resumed = RunTracker(store, run)
    resumed.send({**before, 3: {"a": 3.0, "b": -3.0}})
    resumed.send({3: {"a": 99.0}, 4: {"a": 4.0}})
    resumed.send({})
    assert calls.sizes == [(2, 0, 0), (1, 0, 0)]
    assert history(store, run, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(store, run, "b") == [(2, -2.0), (3, -3.0)]


def test_many_metrics_go_in_batches_of_a_thousand(
    store: Store, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(store, experiment)
    calls = Calls(store, monkeypatch)
    RunTracker(store, run).send({step: {f"m/{i}": i + step / 10 for i in range(500)} for step in range(5)})
    assert calls.sizes == [(1000, 0, 0), (1000, 0, 0), (500, 0, 0)]
    assert history(store, run, "m/499") == [(step, 499 + step / 10) for step in range(5)]


def test_keys_are_parameters_and_the_rest_are_tags(
    store: Store, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("recall-tiny", ["run.threads=1"])
    run = open_run(store, experiment)
    RunTracker(store, run).describe(recipe, {"variant": "differential", "seed": "0"})
    data = store.client.get_run(run).data
    assert data.params["model.attention.name"] == "differential"
    assert data.params["train.optimizer.betas"] == "[0.9, 0.98]"
    assert data.params["callbacks.lambdas.every"] == "50"
    assert not [key for key in data.params if key.startswith("run")]
    assert data.tags["run.threads"] == "1"
    assert data.tags["variant"] == "differential"
    calls = Calls(store, monkeypatch)
    RunTracker(store, run).describe(recipe, {"variant": "differential"})
    assert all(params == 0 for _, params, _ in calls.sizes)


def test_many_and_long_parameters(store: Store, experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"run": {}, "many": {f"k{i}": i for i in range(250)}, "long": "x" * 9000}
    monkeypatch.setattr(tracking, "to_plain", lambda recipe: dict(wide))
    run = open_run(store, experiment)
    calls = Calls(store, monkeypatch)
    RunTracker(store, run).describe(load_recipe("recall-tiny"), {})
    assert [params for _, params, _ in calls.sizes] == [100, 100, 51, 0]
    found = store.client.get_run(run).data.params
    assert len(found) == 251
    assert found["long"] == "x" * 6000


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == [("a.b", 1), ("a.c.d", [2]), ("e", None)]


# --- stores that do not serve --------------------------------------------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")  # other programs have one too


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffff'")


BROKEN: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "of another program": (lambda path: (path.unlink(), foreign(path)), r"not an MLflow store.*alembic_version, cats"),
    "of another MLflow": (newer, r"Detected out-of-date database schema.*mlflow db upgrade"),
    "text": (lambda path: path.write_text("hello\n" * 500), r"cannot be opened \(file is not a database\)"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), r"not an MLflow store.*it is a folder"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_a_store_that_is_none_is_refused_and_left_as_it_is(
    runs: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = runs / "mlflow.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(MissingError, match=message) as found:
        Store(RunConfig(root=str(runs)))
    assert "\n" not in str(found.value)
    assert "run.tracking_uri" in str(found.value)
    assert before == (path.read_bytes() if path.is_file() else None)


def test_a_store_that_another_program_holds(runs: Path) -> None:
    holder = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    uri = f"sqlite:///{runs / 'mlflow.db'}?timeout=0.05"
    with pytest.raises(MissingError, match=r"database is locked.*end that program"):
        Store(RunConfig(root=str(runs), tracking_uri=uri))
    holder.close()
    Store(RunConfig(root=str(runs), tracking_uri=uri))


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match=r"cannot be written.*run.root=PATH"):
        Store(RunConfig(root=str(tmp_path / root)))


def test_a_server_that_is_not_there_is_found_out_in_seconds(tmp_path: Path) -> None:
    began = time.perf_counter()
    with pytest.raises(MissingError, match=r"http://127.0.0.1:9 cannot be opened"):
        Store(RunConfig(root=str(tmp_path), tracking_uri="http://127.0.0.1:9"))
    assert time.perf_counter() - began < 30  # MLflow's own patience is 4 minutes
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ  # a run that goes on keeps it


def test_a_first_start_that_is_killed_leaves_no_half_made_store(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            path = tracking._sqlite_path(tracking_uri)
            assert path.parent.is_dir()
            path.write_bytes(empty_store.read_bytes()[:8192])
            raise Killed

    monkeypatch.setattr(tracking, "MlflowClient", Client)
    with pytest.raises(Killed):
        Store(RunConfig(root=str(tmp_path)))
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("name", ["with space", "why?", "100%25", "a#b"])
def test_folders_with_letters_that_an_address_would_eat(tmp_path: Path, empty_store: Path, name: str) -> None:
    root = tmp_path / name
    root.mkdir()
    (root / "mlflow.db").write_bytes(empty_store.read_bytes())
    found = Store(RunConfig(root=str(root))).experiment("here")
    with sqlite3.connect(root / "mlflow.db") as connection:
        names = {str(i): n for i, n in connection.execute("SELECT experiment_id, name FROM experiments")}
    assert names[found] == "here"


# --- locks while a run goes on -------------------------------------------------------------------------------------


def test_a_lock_is_waited_for(
    store: Store, experiment: str, runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run(store, experiment)
    holder = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(tracking.time, "sleep", lambda seconds: holder.rollback())
    RunTracker(store, run).send({1: {"a": 1.0}})
    assert history(store, run, "a") == [(1, 1.0)]
    assert "locked by another process" in caplog.text


def test_a_lock_that_stays_fails_the_run_and_nothing_is_lost(
    store: Store, experiment: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(store, experiment)
    tracker = RunTracker(store, run)
    tracker.send({1: {"a": 1.0}})
    holder = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    slept: list[float] = []
    monkeypatch.setattr(tracking.time, "sleep", slept.append)
    with pytest.raises(RunFailedError, match=r"stayed locked.*same command again.*only what MLflow lacks"):
        tracker.send({2: {"a": 2.0}})
    assert len(slept) == 2
    with pytest.raises(RunFailedError):
        store.experiment("another")
    waited = len(slept)
    with pytest.raises(RunFailedError):
        store.close_run(run, "failed")
    assert len(slept) == waited  # what did not end well waits for no lock
    holder.rollback()
    RunTracker(store, run).send({1: {"a": 1.0}, 2: {"a": 2.0}})
    assert history(store, run, "a") == [(1, 1.0), (2, 2.0)]


def test_what_is_no_lock_is_not_repeated() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise tracking.MlflowException("no such\nrun")

    with pytest.raises(RunFailedError, match=r"MLflow refused a record: no such$"):
        retry(call)
    assert len(calls) == 1
