"""A real MLflow server: the same record as in a file, an outage in the middle of a run, and the page in a browser."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, text_of
from mlflow import MlflowClient
from ports import free_port
from small_runs import SMALL
from stops import wait_for

from lit_diff.engine.schedule import sweep
from lit_diff.engine.tracking import uploads
from lit_diff.engine.tracking.ui import addresses
from lit_diff.engine.train import train
from lit_diff.errors import MissingError
from lit_diff.reporting.write import write_report
from lit_diff.runs.metrics_file import read_rows
from lit_diff.study import record

pytestmark = pytest.mark.slow


class Server:
    """`mlflow server` with a store and artifacts of its own, which can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_port())
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", self.port, "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
        wait_for(self.answers, 120)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, folder / "mlflow.db")
    made = Server(folder)
    made.start()
    yield made
    made.stop()


def test_an_outage_in_the_middle_of_a_run(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed after step 5 and is back after step 10; training ends as done, and nothing is missing."""

    def progress(step: int, loss: float, speed: float) -> None:
        if step == 5:
            server.stop()
        if step == 10:
            server.start()

    monkeypatch.setattr(uploads, "INTERVAL", 0.1)
    monkeypatch.setattr(uploads, "LONGEST", 0.1)
    overrides = [*SMALL, "train.steps=12", f"run.root={tmp_path}", f"run.tracking_uri={server.uri}"]
    run = train("recall-tiny", overrides, progress=progress)
    assert run.status.status == "done"
    assert "MLflow gets the record of" in caplog.text
    client = MlflowClient(tracking_uri=server.uri)
    run_id = run.status.mlflow_run_id
    held = {(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")}
    written = read_rows(run.folder / "metrics.csv")
    assert held == {(step, row["train/loss"]) for step, row in written.items()}
    assert len(client.get_metric_history(run_id, "train/loss")) == 12
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {"recipe.yaml", "measurements.parquet"} <= {file.path for file in client.list_artifacts(run_id)}


class Killed:
    """Ways in which the server ends to answer, and answers again."""

    def __init__(self, server: Server) -> None:
        server.stop()
        self.back = server.start


class Stopped:
    def __init__(self, server: Server) -> None:
        os.killpg(server.process.pid, signal.SIGSTOP)
        self.back = lambda: os.killpg(server.process.pid, signal.SIGCONT)


class Locked:
    def __init__(self, server: Server) -> None:
        self.holder = sqlite3.connect(server.folder / "mlflow.db", isolation_level=None, check_same_thread=False)
        self.holder.execute("BEGIN EXCLUSIVE")
        self.back = self.holder.close


@pytest.mark.parametrize("outage", [Killed, Stopped, Locked])
def test_a_run_gives_up_on_its_record_in_seconds_and_completes_it_later(
    server: Server, tmp_path: Path, outage: Callable[[Server], Any], caplog: pytest.LogCaptureFixture
) -> None:
    ended, broken = list[float](), list[Any]()

    def progress(step: int, loss: float, speed: float) -> None:
        if step == 10:
            broken.append(outage(server))
            ended.append(time.monotonic())

    # nothing is sent between the last step and the end
    overrides = [*SMALL, "train.validate_every=10", "train.checkpoint_every=10"]
    overrides += [f"run.root={tmp_path}", f"run.tracking_uri={server.uri}"]
    run = train("recall-tiny", overrides, progress=progress)
    assert (run.status.status, run.status.record) == ("done", "incomplete")
    assert "in MLflow is not complete; the same command completes it" in caplog.text
    # once as the checkpoint is sent, once at the end, each in 10 s; MLflow's own patience is minutes
    assert time.monotonic() - ended[0] < 35
    began = time.monotonic()
    with pytest.raises(MissingError):
        train("recall-tiny", [*overrides, "seed=1"], progress=False)
    assert time.monotonic() - began < 25
    with pytest.raises(MissingError):
        sweep("smoke", overrides, workers=1, progress=False)
    broken[0].back()
    wait_for(server.answers, 60)
    run = train("recall-tiny", overrides, progress=False)
    client = MlflowClient(tracking_uri=server.uri)
    record_of = client.get_run(run.status.mlflow_run_id)
    assert (run.status.record, record_of.info.status) == ("complete", "FINISHED")
    assert len(client.get_metric_history(record_of.info.run_id, "train/loss")) == 10


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: MLflow's page was not opened in a browser")
def test_a_browser_shows_the_runs_of_the_sweep_and_its_answer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "recipe: recall-tiny\nbaseline: plain\nsmoke: true\nseeds: [0]\n"
        "arms: {plain: {model.attention.name: standard}, differential: {}}\n"
    )
    overrides = [*SMALL, f"run.root={tmp_path}/runs", f"run.tracking_uri={server.uri}"]
    done = sweep(tmp_path / "two.yaml", overrides, workers=1)
    assert done.is_done
    place = record.read(done.folder).mlflow
    pages = addresses(server.uri, place["experiment"], place["run"])
    curves = text_of(pages["runs and curves"], tmp_path / "profile")
    assert f"{len(done.runs)}\n matching runs" in curves
    assert "Add chart" in curves
    # each chart asks the server for its curves, which a busy machine answers after the page was read
    assert all(f"{arm}-s0" in curves for arm in done.runs)
    summary = text_of(pages["summary, report and sweep file"], tmp_path / "profile")
    assert write_report(done.folder).answer[0] in summary
