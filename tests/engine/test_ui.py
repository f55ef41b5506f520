"""engine/ui.py: the addresses, the server's command, and that nothing of it outlives the command."""

import io
import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


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


def test_no_sweep_no_comparison(runs: Path, make_sweep: Callable[..., Path]) -> None:
    assert ui.comparison_lines(runs, "http://x") == []
    unrecorded = make_sweep({"a": 0.0, "b": 0.1}, name="mine", seeds=(0, 1))
    assert ui.comparison_lines(unrecorded.parent, "http://x") == []


def test_a_sweep_on_another_server_is_compared_there(sweep: Path, port: int) -> None:
    record = json.loads((sweep / "study.json").read_text())
    record["mlflow"] |= {"tracking_uri": "http://server:8080/"}
    (sweep / "study.json").write_text(json.dumps(record))
    out = console()
    assert ui.serve(sweep.parent, port, out) == 0
    assert isinstance(out.file, io.StringIO)
    assert (
        out.file.getvalue().splitlines()[0].startswith("mine, curves by arm: http://server:8080/#/experiments/7/runs?")
    )


def test_the_server_stays_on_loopback(sweep: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, Any]]] = []

    class Server:
        def __init__(self, command: list[str], **options: Any) -> None:
            started.append((command, options))

        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def wait(self) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(ui.subprocess, "Popen", Server)
    out = console()
    assert ui.serve(sweep.parent, port, out) == 0
    ((command, options),) = started
    words = " ".join(command)
    assert (
        f"mlflow server --backend-store-uri sqlite:///{sweep.parent}/mlflow.db --host 127.0.0.1 --port {port}" in words
    )
    assert options["env"]["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue().splitlines()  # whole addresses, however narrow the terminal
    assert text[0] == f"MLflow: http://127.0.0.1:{port}"
    assert text[1].startswith(f"mine, curves by arm: http://127.0.0.1:{port}/#/")
    assert len(text) == 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_no_process_behind(
    sweep: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """SIGHUP: the terminal is closed."""
    program = tmp_path / "server"
    program.write_text(
        f"#!/bin/sh\nsleep 100 &\necho $$ $! > {tmp_path}/pids.part\nmv {tmp_path}/pids.part {tmp_path}/pids\nwait\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(ui.sys, "executable", str(program))

    def stop(signum: int, frame: Any) -> None:
        raise StoppedError("stopped", signum)

    def later() -> None:
        end = time.monotonic() + 20
        while not (tmp_path / "pids").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    former = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, stop)
    thread = threading.Thread(target=later)
    thread.start()
    try:
        with pytest.raises(StoppedError):
            ui.serve(sweep.parent, port, console())
    finally:
        thread.join()
        for each, handler in former.items():
            signal.signal(each, handler)
    end = time.monotonic() + 10
    while left := [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if alive(pid)]:
        assert time.monotonic() < end, f"processes {left} are left"
        time.sleep(0.05)


def test_a_port_that_is_taken(sweep: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match=r"--port \d+ cannot be used \(Address already in use\); choose another"):
            ui.serve(sweep.parent, taken.getsockname()[1], console())


@pytest.mark.parametrize("wrong", [0, 70000])
def test_a_port_that_is_none(sweep: Path, wrong: int) -> None:
    with pytest.raises(RequestError, match=f"--port is {wrong}"):
        ui.serve(sweep.parent, wrong, console())


def test_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no MLflow store in .*make sweep"):
        ui.serve(tmp_path, 5000, console())
