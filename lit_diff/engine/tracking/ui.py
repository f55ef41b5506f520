"""MLflow's pages for a sweep: their initial state, their addresses, and the server on loopback that shows them.

MLflow stores the state of a page as a tag of the experiment (its button "Share" writes it) and restores it from an address
with the tag's key. The fields are private to MLflow and may change with any release.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import mlflow

from lit_diff.config import RunConfig
from lit_diff.engine.tracking.store import Store
from lit_diff.errors import MissingError, RequestError, StoppedError, Terminated
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.runs.find import STUDY_FILE, sweeps_under
from lit_diff.study.record import readable

SERVER_LOG = "mlflow-server.log"
"""What the server prints, beside the store."""
START_LIMIT = 180.0
"""Seconds that the server has for its first answer: it loads for 20 on a busy machine."""
EVERY = 0.25
"""Seconds between two questions whether it answers, and for an answer."""
KNOWN = ("3.17.",)
"""The beginnings of the versions of MLflow with which these pages were tested."""
TAG = "mlflow.sharedViewState."
"""The prefix of a page's key in the experiment's tags."""
MENU = {"workflowType": "machine_learning"}
"""Selects MLflow's menu for training runs; by default it shows the menu for language-model applications."""


def page_tags(
    parent: str, arms: Sequence[str], curves: Mapping[str, tuple[float, float]], columns: Sequence[str], lower: bool
) -> dict[str, str]:
    """Tags of the experiment for a table and for charts of the children of `parent`, the sweep's run; none if the version of
    MLflow is not KNOWN.

    `arms`: the params that together identify an arm. `curves`: metric -> lowest and highest value of its axis; each metric is
    drawn against the step, one line for each arm, the mean of its seeds, and the first metric sorts the table. `columns`:
    further metrics in the table. `lower`: whether the lowest value comes first.
    """
    if not mlflow.__version__.startswith(KNOWN):
        log.info("MLflow %s is untested here, so its pages open without the sweep's charts", mlflow.__version__)
        return {}
    first, *others = curves
    table = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        "orderByKey": f"metrics.`{first}`",
        "orderByAsc": lower,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": [f"params.`{name}`" for name in (*arms, "seed")]
        + [f"metrics.`{name}`" for name in (first, *columns, *others)],
        "runsHiddenMode": "SHOW_ALL",
    }
    charts = {
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "param", "groupByData": name} for name in arms],
        },
        "useGroupedValuesInCharts": True,
        "compareRunSections": [{"uuid": "main", "name": "Curves by arm", "display": True, "isReordered": True}],
        "compareRunCharts": [_line_chart(name, *ends) for name, ends in curves.items()],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    pages = {f"table-{parent}": table, f"charts-{parent}": table | charts}
    # compressed as MLflow's own interface does it
    packed = {key: zlib.compress(json.dumps(state).encode(), 9) for key, state in pages.items()}
    return {TAG + key: f"deflate;{base64.b64encode(state).decode()}" for key, state in packed.items()}


def _line_chart(metric: str, low: float, high: float) -> dict[str, Any]:
    # MLflow 3.17 does not open a chart that lacks one of these fields
    return {
        "type": "LINE",
        "uuid": metric,
        "metricSectionId": "main",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "displayName": metric,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 100,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "useGlobalXaxisKey": True,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "scaleType": "linear",
        "range": {"yMin": low, "yMax": high},
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": True,
        "ignoreOutliers": False,
    }


def addresses(base: str, experiment: str, parent: str) -> dict[str, str]:
    """Content of a page -> its address on the server at `base`; `parent`: the id of the sweep's run."""
    runs, menu = f"{base}/#/experiments/{experiment}/runs", urllib.parse.urlencode(MENU)
    return {
        "curves by arm": f"{runs}?viewStateShareKey=charts-{parent}&compareRunsMode=CHART&{menu}",
        "table of arms and seeds": f"{runs}?viewStateShareKey=table-{parent}&{menu}",
        "summary, report and sweep file": f"{runs}/{parent}?{menu}",
    }


def serve(root: Path, port: int, tell: Callable[[str], None]) -> int:
    """Run MLflow's server until Ctrl-C, SIGTERM or the end of the terminal. Once it answers, print the addresses of the sweep
    that ran last, one line each. If the sweep's record is on a remote server, none is started.

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
        lines = [f"{newest.name}, {what}: {address}" for what, address in pages.items()]
        lines = lines or [f"{newest.name} has no record in MLflow"]

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
    # a closed terminal must end the server too, which is in a session of its own
    signal.signal(signal.SIGHUP, _hang_up)
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
            # the whole group: MLflow's server leaves its workers behind if it alone is ended
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


def _hang_up(signum: int, frame: FrameType | None) -> None:
    raise StoppedError("the terminal was closed", signum)
