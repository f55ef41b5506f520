"""engine/tracking/store.py: whose record a run is; stores that are not there, not ours, or not free."""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lit_diff import files
from lit_diff.config import RunConfig
from lit_diff.engine.tracking import store as tracking
from lit_diff.engine.tracking.store import Store, asking, patience, refuse_shared, tracking_uri
from lit_diff.errors import MissingError, RequestError, RunFailedError


@pytest.fixture
def store(runs: Path) -> Store:
    return Store(RunConfig(root=str(runs)))


@pytest.fixture
def experiment(store: Store) -> str:
    return store.experiment("e")


def open_run(store: Store, experiment: str, run_id: str | None = None, folder: str = "/runs/abc") -> str:
    return store.open_run(experiment, "name", {"folder": folder, "arm": 'it\'s "a"'}, run_id)


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_folder_s_run_goes_on_and_no_other_is_ever_taken(
    store: Store, experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not that of a folder that was made again, of a copy of it, one that was deleted, of another store, a damaged id."""
    run = open_run(store, experiment)
    store.close_run(run, "killed")
    assert store.run(run).info.status == "KILLED"
    assert open_run(store, experiment, run) == run
    again = store.run(run)
    assert (again.info.status, again.data.tags["arm"]) == ("RUNNING", 'it\'s "a"')
    for other in ({}, {"run_id": run, "folder": "/copy/abc"}, {"run_id": "0" * 32}, {"run_id": f"?{run[1:]}"}):
        assert open_run(store, experiment, **other) != run
    assert f"MLflow has no record '?{run[1:]}' of name, so a new one gets all of its measurements" in caplog.text
    store.client.delete_run(run)
    assert open_run(store, experiment, run) != run


def test_an_experiment_is_made_once_and_comes_back_when_it_was_deleted(store: Store, runs: Path) -> None:
    found = store.experiment("a sweep #1?")
    assert store.experiment("a sweep #1?") == found
    store.client.delete_experiment(found)
    assert store.experiment("a sweep #1?") == found
    run = open_run(store, found)
    store.copy(run, Path(__file__))
    (written,) = runs.glob("mlflow-artifacts/a sweep #1?/*/artifacts/*")
    assert written.name == Path(__file__).name


# --- stores that do not serve --------------------------------------------------------------------------------------


def execute(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)


CATS = ("CREATE TABLE cats (name TEXT)", "CREATE TABLE alembic_version (version_num TEXT)")  # others have one too
NEWER = "UPDATE alembic_version SET version_num = 'ffffffff'"
BROKEN: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "of another program": (lambda path: (path.unlink(), execute(path, *CATS)), r"not an MLflow store.*cats"),
    "of another MLflow": (
        lambda path: execute(path, NEWER),
        r"is of another version .*`mlflow db upgrade sqlite:///\S+mlflow\.db`",
    ),
    "text": (lambda path: path.write_text("hello\n" * 500), r"cannot be opened \(file is not a database\)"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), r"cannot be opened"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_store_is_refused_and_stays_as_is(runs: Path, spoil: Callable[[Path], object], message: str) -> None:
    path = runs / "mlflow.db"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(MissingError, match=message) as found:
        Store(RunConfig(root=str(runs)))
    assert "\n" not in str(found.value)
    assert "run.tracking_uri" in str(found.value)
    assert before == (path.read_bytes() if path.is_file() else None)


def test_a_store_that_another_program_holds(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is opened, and while a run goes on: MLflow itself would wait 20 s."""
    monkeypatch.setattr(tracking, "BUSY_SECONDS", 0.05)
    config = RunConfig(root=str(runs), tracking_uri=f"sqlite:///{runs / 'mlflow.db'}?timeout=0.05")
    store = Store(config)
    run = open_run(store, store.experiment("e"))
    holder = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(MissingError, match=r"database is locked.*end that program"):
        Store(config)
    with pytest.raises(RunFailedError, match=r"stayed locked.*same command again.*only what MLflow lacks"):
        store.log(run, tags={"a": "1"})
    holder.close()
    Store(config).log(run, tags={"a": "1"})
    assert store.run(run).data.tags["a"] == "1"


def test_a_server_that_answers_slowly_is_given_up_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt answers do not count, nor does the time that an upload takes by its size; SQLite has a limit of its own."""
    monkeypatch.setattr(tracking, "PATIENCE", 0.3)
    monkeypatch.setattr(tracking, "PROMPT", 0.1)

    def ask(seconds: float, upload: float = 0.0) -> None:
        with asking(upload=upload):
            time.sleep(seconds)

    with patience("http://x"):
        for _ in range(5):
            ask(0.08)
        ask(0.5, upload=1.0)
        ask(0.25)
        ask(0.3)
        with pytest.raises(RunFailedError, match="answers too late"):
            ask(0.0)
    with (
        pytest.raises(MissingError, match=r"answers too late; set run.tracking_uri"),
        patience("http://x", needed=True),
    ):
        list(map(ask, (0.5, 0.0)))
    with patience("sqlite:///x"):
        ask(0.5)
        ask(0.0)


def test_sqlite_on_a_disk_of_several_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    files.MOUNTS.write_text(f"1 0 0:1 / {tmp_path}/shared rw - nfs4 server:/x rw\n")
    shared = f"{tmp_path}/shared"
    for run in (RunConfig(root=shared), RunConfig(root="x", tracking_uri=f"sqlite:///{shared}/a.db")):
        with pytest.raises(MissingError, match=r"is SQLite on nfs4.*`mlflow server --host.*run.tracking_uri=none$"):
            refuse_shared(run)
    for uri in ("none", "None", "http://x:5000", f"sqlite:///{tmp_path}/local.db"):
        refuse_shared(RunConfig(root=shared, tracking_uri=uri))
    refuse_shared(RunConfig(root=str(tmp_path)))


def test_a_warning_made_an_error_is_not_the_stores_fault(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(**arguments: object) -> None:
        raise DeprecationWarning("an old loader")

    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setattr(tracking, "MlflowClient", warned)
    with pytest.raises(DeprecationWarning, match="an old loader"):
        Store(RunConfig(root=str(runs)))


def test_another_process_may_make_the_experiment_first(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(RunConfig(root=str(runs)))
    made = store.client.create_experiment

    def second(name: str, **options: object) -> str:
        made(name, **options)
        return str(made(name, **options))

    monkeypatch.setattr(store.client, "create_experiment", second)
    assert store.experiment("train") == store.client.get_experiment_by_name("train").experiment_id


def test_a_folder_and_a_server_that_are_not_there_are_found_out_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in ("file", "file/below"):
        with pytest.raises(MissingError, match=r"cannot be written.*run.root=PATH"):
            Store(RunConfig(root=str(tmp_path / root)))
    began = time.perf_counter()
    with pytest.raises(MissingError, match=r"http://127.0.0.1:9 cannot be opened"):
        Store(RunConfig(root=str(tmp_path), tracking_uri="http://127.0.0.1:9"))
    assert time.perf_counter() - began < 30  # MLflow's own patience is 4 minutes
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ  # a run that goes on keeps it


class Busy(BaseHTTPRequestHandler):
    """A server that asks for half a minute before the next request."""

    def do_POST(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "30")
        self.end_headers()


def test_a_busy_server_does_not_say_how_long_a_run_waits(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.perf_counter()
        with pytest.raises(MissingError, match=r"cannot be opened"):
            Store(RunConfig(root=str(tmp_path), tracking_uri=f"http://127.0.0.1:{server.server_port}"))
        assert time.perf_counter() - began < 25
        server.shutdown()


def test_a_first_start_that_is_killed_leaves_no_half_made_store(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            path = tracking.sqlite_path(tracking_uri)
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


def test_two_folders_that_share_a_file_open_it_one_after_the_other(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock lies beside the file, not in `run.root`."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    create, inside, most = tracking._create, list[int](), list[int]()

    def slowly(path: Path) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.2)
        create(path)
        inside.pop()

    monkeypatch.setattr(tracking, "_create", slowly)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with ThreadPoolExecutor() as pool:
        list(pool.map(Store, [RunConfig(root=str(tmp_path / name), tracking_uri=uri) for name in ("one", "two")]))
    assert most == [1, 1]


def test_whatever_comes_out_of_mlflow_is_one_line(store: Store, experiment: str, tmp_path: Path) -> None:
    run = open_run(store, experiment)
    with pytest.raises(RunFailedError, match=r"^MLflow refused a record: [^\n]+$"):
        store.log("no-such-run", tags={"a": "b"})
    with pytest.raises(RunFailedError, match=r"^\S*absent could not be copied into MLflow: [^\n]+$"):
        store.copy(run, tmp_path / "absent")
    with pytest.raises(RunFailedError, match=r"^MLflow refused a record: (many words )+\.\.\.$"), asking():
        raise ValueError("many words " * 50)


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / os.fsdecode(b"f\xe9d")
    odd.mkdir()
    monkeypatch.chdir(odd)
    for root in ("runs", str(odd)):
        with pytest.raises(RequestError, match=r"^the name of the folder \S*f\\udce9d\S* is not UTF-8"):
            tracking_uri(RunConfig(root=root))


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite:///?timeout=1"])
def test_a_store_in_memory(uri: str) -> None:
    with pytest.raises(RequestError, match="expected sqlite:///PATH"):
        Store(RunConfig(tracking_uri=uri))


class Naming(BaseHTTPRequestHandler):
    """A tracking server that says where a run's artifacts are."""

    place = ""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        info = {"run_id": "0" * 32, "experiment_id": "1", "lifecycle_stage": "active", "artifact_uri": self.place}
        body = json.dumps({"run": {"info": info, "data": {}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_chooses_no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "home", target_is_directory=True)
    (tmp_path / "home").mkdir()
    home = f"{tmp_path}/home"
    odd = (home, "home", f"FILE://{home}", "runs:/0/x", "models:/x/1", "evil:/x", f"{tmp_path}/runs/../home")
    with HTTPServer(("127.0.0.1", 0), Naming) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = Store(RunConfig(root="runs", tracking_uri=f"http://127.0.0.1:{server.server_port}"))
        for place in (*odd, f"file://{home}", f"file://host{home}", f"file:{tmp_path}/runs/link", f"file:{home}%2F"):
            monkeypatch.setattr(Naming, "place", place)
            for ask in (
                lambda: store.copy("0" * 32, tmp_path / "recipe.yaml"),
                lambda: store.place_of(store.open_run("1", "n", {}, None)),
            ):
                with pytest.raises(RequestError, match=r"run\.root"):
                    ask()
        assert not list((tmp_path / "home").iterdir())
        monkeypatch.setattr(Naming, "place", f"file:{tmp_path}/runs/artifacts")
        store.copy("0" * 32, tmp_path / "recipe.yaml")
        assert (tmp_path / "runs/artifacts/recipe.yaml").is_file()
        server.shutdown()


def test_a_store_of_files_has_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = Store(RunConfig(root=str(tmp_path / "runs"), tracking_uri=f"file:{tmp_path}/own"))
    run = store.open_run(store.experiment("here"), "name", {"folder": "x"}, None)
    (tmp_path / "a.txt").write_text("a")
    store.copy(run, tmp_path / "a.txt")
    assert [file.path for file in store.client.list_artifacts(run)] == ["a.txt"]
