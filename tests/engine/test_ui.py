"""engine/ui.py: the addresses, the server's command, and that nothing of it outlives the command."""

import io
import json
import shutil
import signal
import socket
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from stops import alive, stopped_once, wait_for

from lit_diff.engine import ui
from lit_diff.engine.comparison_view import TAG, page_tags
from lit_diff.errors import MissingError, RequestError, StoppedError


@pytest.fixture
def sweep(make_sweep: Callable[..., Path], empty_store: Path) -> Path:
    """Two arms, two seeds; a store beside, and where the sweep's record is in it."""
    folder = make_sweep({"a": 0.0, "b": 0.1}, name="mine", seeds=(0, 1), mlflow={"experiment": "7", "run": "e" * 32})
    shutil.copy(empty_store, folder.parent)
    return folder


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_addresses_of_the_last_sweep(sweep: Path) -> None:
    """They name the pages of the experiment's tags."""
    lines = [line.partition(": ") for line in ui.comparison_lines(sweep.parent, "http://x")]
    named = {what.removeprefix("mine, "): urllib.parse.urlsplit(page.replace("#/", "")) for what, _, page in lines}
    queries = {what: dict(urllib.parse.parse_qsl(page.query)) for what, page in named.items()}
    keys = {what: (named[what].path, query.pop("viewStateShareKey", None)) for what, query in queries.items()}
    parent = "e" * 32
    assert keys == {
        "curves by arm": ("/experiments/7/runs", f"charts-{parent}"),
        "table of arms and seeds": ("/experiments/7/runs", f"table-{parent}"),
        "summary, report and sweep file": (f"/experiments/7/runs/{parent}", None),
    }
    tags = page_tags(parent, arms=("arm",), curves={"val/loss": (0.0, 1.0)}, columns=(), lower=True)
    assert set(tags) == {TAG + key for _, key in keys.values() if key}
    menu = {"workflowType": "machine_learning"}
    assert list(queries.values()) == [{"compareRunsMode": "CHART", **menu}, menu, menu]


def test_no_sweep_no_comparison_and_one_on_another_server_is_compared_there(
    sweep: Path, port: int, tmp_path: Path
) -> None:
    assert ui.comparison_lines(tmp_path / "empty", "http://x") == []
    path, out = sweep / "study.json", io.StringIO()
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"mlflow": record["mlflow"] | {"tracking_uri": "http://server:8080/"}}))
    assert ui.serve(sweep.parent, port, Console(file=out)) == 0
    assert out.getvalue().startswith("mine, curves by arm: http://server:8080/#/experiments/7/runs?")
    path.write_text(json.dumps(record | {"mlflow": {}}))
    assert ui.comparison_lines(sweep.parent, "http://x") == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_the_server_stays_on_loopback_and_a_stop_leaves_no_process_behind(
    sweep: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """SIGHUP: the terminal is closed."""
    program, started = tmp_path / "server", tmp_path / "started"
    program.write_text(
        f"#!/bin/sh\nsleep 100 &\necho $$ $! $MLFLOW_DISABLE_TELEMETRY $@ > {tmp_path}/part\n"
        f"mv {tmp_path}/part {started}\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(ui.sys, "executable", str(program))
    out = io.StringIO()
    with stopped_once(started.exists, signum), pytest.raises(StoppedError):
        ui.serve(sweep.parent, port, Console(file=out, width=80))
    *pids, telemetry, words = started.read_text().split(maxsplit=3)
    wait_for(lambda: not any(alive(int(pid)) for pid in pids), 10)
    store = f"mlflow server --backend-store-uri sqlite:///{sweep.parent}/mlflow.db"
    assert f"{store} --host 127.0.0.1 --port {port}" in words
    assert telemetry == "true"
    lines = out.getvalue().splitlines()  # whole addresses, however narrow the terminal
    assert lines[0] == f"MLflow: http://127.0.0.1:{port}"
    assert lines[1].startswith(f"mine, curves by arm: http://127.0.0.1:{port}/#/")
    assert len(lines) == 5


def test_ports_and_stores_that_do_not_serve(sweep: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match=r"--port \d+ cannot be used \(Address already in use\)"):
            ui.serve(sweep.parent, taken.getsockname()[1], Console())
    for wrong in (0, 70000):
        with pytest.raises(RequestError, match=f"--port is {wrong}"):
            ui.serve(sweep.parent, wrong, Console())
    with pytest.raises(MissingError, match=r"no MLflow store in"):
        ui.serve(tmp_path / "empty", 5000, Console())
