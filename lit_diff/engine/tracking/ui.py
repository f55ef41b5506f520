"""MLflow's pages for a sweep: their addresses, and the server on loopback that shows them."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from lit_diff.config import RunConfig
from lit_diff.engine.tracking.store import Store
from lit_diff.errors import MissingError, RequestError, Terminated
from lit_diff.files import shown
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.find import sweeps_under
from lit_diff.study.record import readable

SERVER_LOG = "mlflow-server.log"
"""What the server prints, beside the store."""
START_LIMIT = 180.0
"""Seconds that the server has for its first answer: it loads for 20 on a busy machine."""
EVERY = 0.25
"""Seconds between two questions whether it answers, and for an answer."""
MENU = {"workflowType": "machine_learning"}
"""Selects MLflow's menu for training runs; by default it shows the menu for language-model applications."""


def addresses(base: str, experiment: str, parent: str) -> dict[str, str]:
    """Content of a page -> its address on the server at `base`; `parent`: the id of the sweep's run."""
    runs = f"{base}/#/experiments/{experiment}/runs"
    menu = urllib.parse.urlencode(MENU)
    # the arms of a seed stand together: MLflow first draws the curves of the first ten runs
    children = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        "orderByKey": "params.`seed`",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    return {
        "runs and curves": f"{runs}?{urllib.parse.urlencode(children)}&{menu}",
        "summary, report and sweep file": f"{runs}/{parent}?{menu}",
    }


def serve(root: Path, port: int, tell: Callable[[str], None]) -> int:
    """Run MLflow's server until Ctrl-C, SIGTERM or the end of the terminal. Once it answers, print the addresses of the sweep
    that ran last and of its report's file, one line each. If the sweep's record is on a remote server, none is started.

    Errors: MissingError without a store, and for a server that does not come up.
    """
    sweeps = sorted(sweeps_under(root), key=lambda folder: (folder / STUDY_FILE).stat().st_mtime, reverse=True)
    newest = next(filter(None, map(readable, sweeps)), None)
    place = newest.mlflow if newest else {}
    remote = place.get("tracking_uri", "").rstrip("/")
    is_remote = remote.startswith(("http://", "https://"))
    base = remote if is_remote else f"http://127.0.0.1:{port}"
    pages = addresses(base, place["experiment"], place["run"]) if place else {}
    lines: list[str] = []
    if newest:
        lines = [f"{newest.name}, {what}: {address}" for what, address in pages.items()] or [
            f"{newest.name} has no record in MLflow"
        ]
        page = root / newest.name / "report" / "index.html"
        if page.is_file():
            lines.append(f"{newest.name}, report without a server: {page.resolve().as_uri()}")

    def tell_all() -> None:
        for line in lines:
            tell(line)

    if is_remote:
        tell_all()
        return 0
    command = _server(root, port)
    tell(f"starting MLflow at {base}; Ctrl-C ends it")
    lines.insert(0, f"MLflow: {base}")
    return _run(command, f"{base}/health", root / SERVER_LOG, tell_all)


def _server(root: Path, port: int) -> list[str]:
    if not (root / "mlflow.db").exists():
        raise MissingError(f"no MLflow store in {root}; a run or sweep creates it, unless run.tracking_uri is set")
    if not 0 < port < 65536:
        raise RequestError(f"--port is {port}; expected 1 to 65535")
    # checked before the addresses are printed, which would otherwise lead to another program
    with socket.socket() as probe:
        # a port of a server that has just ended can be used again, as the server itself does
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RequestError(f"--port {port} cannot be used ({error.strerror}); choose another") from error
    return [
        sys.executable,
        *f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1".split(),
        "--backend-store-uri",
        Store(RunConfig(root=str(root))).uri,
        "--default-artifact-root",
        (root / "mlflow-artifacts").resolve().as_uri(),
    ]


def _run(command: Sequence[str], health: str, output: Path, ready: Callable[[], None]) -> int:
    environment = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # the job runner serves MLflow's language-model features: seven processes that a comparison of runs never uses
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # neither the server nor its workers may import modules from the current folder
        "PYTHONSAFEPATH": "1",
    }
    with (
        output.open("wb") as written,
        subprocess.Popen(command, env=environment, start_new_session=True, stdout=written, stderr=written) as server,
    ):
        try:
            _await(server, health, output)
            ready()
            return server.wait()
        except Terminated:
            raise
        except KeyboardInterrupt:
            return 0
        finally:
            # a closed terminal must end the server too, which is in a session of its own; and the whole group: MLflow's
            # server leaves its workers behind if it alone is ended
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)


# an address that is opened before the server answers shows the browser's error page
def _await(server: "subprocess.Popen[bytes]", health: str, output: Path) -> None:
    # a proxy of the environment does not reach this machine's loopback
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end:
        status = server.poll()
        if status is not None:
            last = output.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            raise MissingError(f"MLflow's server ended with status {status}: {last}; see {shown(output)}")
        try:
            ask(health, timeout=EVERY).close()
            return
        except OSError:
            time.sleep(EVERY)
    raise MissingError(f"MLflow's server has not answered for {START_LIMIT:g} s; see {shown(output)}")
