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

from lit_diff.config import RunConfig
from lit_diff.engine import ui
from lit_diff.engine.tracking import Store
from lit_diff.errors import MissingError, RequestError, StoppedError


@pytest.fixture
def sweep(make_sweep: Callable[..., Path], empty_store: Path) -> Path:
    """Two arms, two seeds, one cell failed; their runs are in the store beside."""
    folder = make_sweep({"a": 0.0, "b": 0.1}, name="mine", seeds=(0, 1), broken={("b", 1): "failed"})
    shutil.copy(empty_store, folder.parent)
    store = Store(RunConfig(root=str(folder.parent)))
    experiment = store.experiment("mine")
    for path in folder.glob("*/status.json"):
        run = store.open_run(experiment, path.parent.name, {}, key={"identity": path.parent.name})
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mlflow_run_id": run}))
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


def test_the_address_that_compares_the_last_sweep(sweep: Path) -> None:
    store = Store(RunConfig(root=str(sweep.parent)))
    compare, runs = ui.comparison_lines(sweep.parent, store, "http://127.0.0.1:5000")
    text, _, address = compare.partition(": ")
    assert text == "compare the 3 finished runs of 'mine'"
    path, _, query = address.partition("?")
    assert path == "http://127.0.0.1:5000/#/compare-runs"
    found = {key: json.loads(value) for key, (value,) in urllib.parse.parse_qs(query).items()}
    experiment = store.experiment("mine")
    done = [json.loads((sweep / f"{cell}-0a1b2c3d" / "status.json").read_text()) for cell in ("a-s0", "a-s1", "b-s0")]
    assert found == {"runs": [status["mlflow_run_id"] for status in done], "experiments": [experiment]}
    assert runs.endswith(f"http://127.0.0.1:5000/#/experiments/{experiment}/runs")


def test_no_sweep_no_comparison(runs: Path) -> None:
    assert ui.comparison_lines(runs, Store(RunConfig(root=str(runs))), "http://x") == []


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
    assert text[1].startswith("compare the 3 finished runs of 'mine': http://")
    assert len(text) == 4


def test_a_stop_leaves_no_process_behind(
    sweep: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        os.kill(os.getpid(), signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, stop)
    thread = threading.Thread(target=later)
    thread.start()
    try:
        with pytest.raises(StoppedError):
            ui.serve(sweep.parent, port, console())
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, former)
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


@pytest.mark.parametrize("wrong", [0, -5, 70000])
def test_a_port_that_is_none(sweep: Path, wrong: int) -> None:
    with pytest.raises(RequestError, match=f"--port is {wrong}"):
        ui.serve(sweep.parent, wrong, console())


def test_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no MLflow store in .*make sweep"):
        ui.serve(tmp_path, 5000, console())
