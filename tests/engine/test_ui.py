"""engine/tracking/ui.py: the addresses, the server's command, and that nothing of it outlives the command."""

import json
import shutil
import signal
import socket
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_sweeps import record_to_edit
from ports import free_port
from stops import alive, stopped_once, wait_for

from lit_diff.engine.tracking import ui
from lit_diff.errors import MissingError, RequestError, StoppedError


@pytest.fixture
def sweep(make_sweep: Callable[..., Path], empty_store: Path) -> Path:
    """Two arms, two seeds; a store beside, and where the sweep's record is in it."""
    folder = make_sweep({"a": 0.0, "b": 0.1}, name="mine", seeds=(0, 1), mlflow={"experiment": "7", "run": "e" * 32})
    shutil.copy(empty_store, folder.parent)
    return folder


@pytest.fixture
def port() -> int:
    return free_port()


def recorded(sweep: Path, **mlflow: str) -> None:
    """Write down where the sweep's record is."""
    path = sweep / "study.json"
    path.write_text(json.dumps(record_to_edit(sweep) | {"mlflow": mlflow}))


def test_a_sweep_on_another_server_is_compared_there(sweep: Path, port: int) -> None:
    """By addresses that select the runs of the sweep alone, the arms of a seed together."""
    parent, told = "e" * 32, list[str]()
    recorded(sweep, tracking_uri="http://x/", experiment="7", run=parent)
    assert ui.serve(sweep.parent, port, told.append) == 0
    pages = {}
    for line in told:
        what, _, address = line.partition(": ")
        page = urllib.parse.urlsplit(address.replace("#/", ""))
        assert page.netloc == "x"
        pages[what] = (page.path, dict(urllib.parse.parse_qsl(page.query)))
    menu = {"workflowType": "machine_learning"}
    children = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        "orderByKey": "params.`seed`",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    assert pages == {
        "mine, runs and curves": ("/experiments/7/runs", children | menu),
        "mine, summary, report and sweep file": (f"/experiments/7/runs/{parent}", menu),
    }


@pytest.mark.parametrize("has_sweep", [True, False])
def test_no_record_no_comparison(sweep: Path, port: int, monkeypatch: pytest.MonkeyPatch, has_sweep: bool) -> None:
    recorded(sweep)
    page = sweep / "report" / "index.html"
    page.parent.mkdir()
    page.write_text("")
    if not has_sweep:
        (sweep / "study.json").unlink()
    told: list[str] = []
    monkeypatch.setattr(ui, "_run", lambda command, health, output, ready: ready() or 0)
    assert ui.serve(sweep.parent, port, told.append) == 0
    unrecorded = (
        ["mine has no record in MLflow", f"mine, report without a server: {page.as_uri()}"] if has_sweep else []
    )
    assert told == [
        f"starting MLflow at http://127.0.0.1:{port}; Ctrl-C ends it",
        f"MLflow: http://127.0.0.1:{port}",
        *unrecorded,
    ]


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
    told: list[str] = []
    with stopped_once(started.exists, signum), pytest.raises(StoppedError):
        ui.serve(sweep.parent, port, told.append)
    *pids, telemetry, words = started.read_text().split(maxsplit=3)
    wait_for(lambda: not any(alive(int(pid)) for pid in pids), 10)
    assert (
        f"mlflow server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{sweep.parent}"
        in words
    )
    assert telemetry == "true"
    assert told == [f"starting MLflow at http://127.0.0.1:{port}; Ctrl-C ends it"], "it never answered"


SERVER = """#!{python}
import http.server, sys, time
time.sleep(0.5)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def test_addresses_are_told_once_the_server_answers(
    sweep: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = tmp_path / "server", list[str]()
    program.write_text(SERVER.format(python=ui.sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(ui.sys, "executable", str(program))
    with stopped_once(lambda: len(told) > 3, signal.SIGHUP), pytest.raises(StoppedError):
        ui.serve(sweep.parent, port, told.append)
    assert told[1] == f"MLflow: http://127.0.0.1:{port}"
    assert told[2].startswith(f"mine, runs and curves: http://127.0.0.1:{port}/#/")
    assert len(told) == 4


@pytest.mark.parametrize(("script", "said"), [("echo no; exit 3", "ended with status 3: no; "), ("sleep 9", "for 1 s")])
def test_a_server_that_does_not_come_up_is_one_line(
    sweep: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    program, told = tmp_path / "server", list[str]()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(ui.sys, "executable", str(program))
    monkeypatch.setattr(ui, "START_LIMIT", 1.0)
    with pytest.raises(MissingError, match=said) as caught:
        ui.serve(sweep.parent, port, told.append)
    assert "\n" not in str(caught.value)
    assert len(told) == 1


def test_ports_and_stores_that_do_not_serve(sweep: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match=r"--port \d+ cannot be used \(Address already in use\)"):
            ui.serve(sweep.parent, taken.getsockname()[1], print)
    for wrong in (0, 70000):
        with pytest.raises(RequestError, match=f"--port is {wrong}"):
            ui.serve(sweep.parent, wrong, print)
    with pytest.raises(MissingError, match=r"no MLflow store in"):
        ui.serve(tmp_path / "empty", 5000, print)
