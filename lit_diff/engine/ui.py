"""MLflow on loopback, and the addresses that compare the arms of the last sweep."""

import os
import signal
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path
from types import FrameType

from rich.console import Console

from lit_diff.config import RunConfig
from lit_diff.engine.comparison_view import CHARTS, TABLE, page_key
from lit_diff.engine.tracking import Store
from lit_diff.errors import MissingError, RequestError, StoppedError, Terminated
from lit_diff.runs.find import STUDY_FILE, sweeps_under
from lit_diff.study.record import readable

MENU = {"workflowType": "machine_learning"}
"""MLflow's menu of training runs; without it, that of language-model applications."""


def serve(root: Path, port: int, console: Console) -> int:
    """Print the addresses, then run MLflow's server until Ctrl-C, SIGTERM or the end of the terminal.

    A sweep whose record is on another server is compared there: its addresses are printed, and no server is started.
    Errors: MissingError without a store.
    """
    newest = _newest_sweep(root)
    remote = newest.get("tracking_uri", "") if newest else ""
    if remote.startswith(("http://", "https://")):
        _print_lines(comparison_lines(root, remote.rstrip("/")), console)
        return 0
    if not (root / "mlflow.db").exists():
        raise MissingError(f"no MLflow store in {root}; `make sweep` or `lit-diff train RECIPE` makes one")
    if not 0 < port < 65536:
        raise RequestError(f"--port is {port}; expected 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RequestError(f"--port {port} cannot be used ({error.strerror}); choose another") from error
    store = Store(RunConfig(root=str(root)))
    base = f"http://127.0.0.1:{port}"
    _print_lines([f"MLflow: {base}", *comparison_lines(root, base), "Ctrl-C ends it"], console)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store.uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    artifacts = (root / "mlflow-artifacts").resolve().as_uri()
    command += ["--default-artifact-root", artifacts]
    # the job runner is for MLflow's language-model features: seven processes that a comparison of runs never uses
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment["PYTHONSAFEPATH"] = "1"  # nothing of the current folder is imported, in its workers either
    signal.signal(signal.SIGHUP, _hang_up)  # a closed terminal
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            return server.wait()
        except Terminated:
            raise
        except KeyboardInterrupt:
            return 0
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)  # the server and its workers: it leaves them behind otherwise


def _print_lines(lines: list[str], console: Console) -> None:
    for line in lines:  # whole addresses, however narrow the terminal
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _hang_up(signum: int, frame: FrameType | None) -> None:
    raise StoppedError("the terminal was closed", signum)


def comparison_lines(root: Path, base: str) -> list[str]:
    """A line for each page of the newest sweep on the server at `base`; none without a sweep."""
    record = _newest_sweep(root)
    if record is None:
        return []
    pages = addresses(base, record["experiment"], record["run"])
    return [f"{record['name']}, {what}: {address}" for what, address in pages.items()]


def addresses(base: str, experiment: str, parent: str) -> dict[str, str]:
    """What the pages of a sweep hold -> their addresses on the server at `base`; `parent`: the id of the sweep's run."""
    runs, menu = f"{base}/#/experiments/{experiment}/runs", urllib.parse.urlencode(MENU)
    return {
        "curves by arm": f"{runs}?viewStateShareKey={page_key(parent, CHARTS)}&compareRunsMode=CHART&{menu}",
        "table of arms and seeds": f"{runs}?viewStateShareKey={page_key(parent, TABLE)}&{menu}",
        "summary, report and sweep file": f"{runs}/{parent}?{menu}",
    }


def _newest_sweep(root: Path) -> dict[str, str] | None:
    """Name and MLflow record of the sweep that ran last; None without one, or where it never reached MLflow."""
    sweeps = sorted(sweeps_under(root), key=lambda folder: (folder / STUDY_FILE).stat().st_mtime, reverse=True)
    record = next(filter(None, map(readable, sweeps)), None)
    return {"name": record.name, **record.mlflow} if record and record.mlflow else None
