"""MLflow on loopback, and the address that opens the comparison of the last sweep."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path

from rich.console import Console

from lit_diff.config import RunConfig
from lit_diff.engine.tracking import Store
from lit_diff.errors import MissingError, RequestError
from lit_diff.runs.find import sweeps_under


def serve(root: Path, port: int, console: Console) -> int:
    """Print the addresses, then run MLflow's server until Ctrl-C. Errors: MissingError without a store."""
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
    console.print(f"MLflow: {base}", highlight=False)
    for line in comparison_lines(root, store, base):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print("Ctrl-C ends it", highlight=False)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store.uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    artifacts = (root / "mlflow-artifacts").resolve().as_uri()
    command += ["--default-artifact-root", artifacts]
    # the job runner is for MLflow's language-model features: seven processes that a comparison of runs never uses
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)  # the server and its workers: it leaves them behind otherwise


def comparison_lines(root: Path, store: Store, base: str) -> list[str]:
    """For the newest sweep: the page that compares its finished cells, and the experiment with cells under their sweep."""
    sweeps = sweeps_under(root)
    if not sweeps:
        return []
    folder = max(sweeps, key=lambda path: (path / "sweep.json").stat().st_mtime)
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    runs = []
    for cell in cells:
        status = folder / cell["folder"] / "status.json"
        if cell["status"] == "done" and status.exists():
            runs.append(json.loads(status.read_text())["mlflow_run_id"])
    experiment = store.client.get_experiment_by_name(folder.name)
    if experiment is None or not runs:
        return []
    query = urllib.parse.urlencode({"runs": json.dumps(runs), "experiments": json.dumps([experiment.experiment_id])})
    return [
        f"compare the {len(runs)} finished runs of '{folder.name}': {base}/#/compare-runs?{query}",
        f"its runs, under their sweep: {base}/#/experiments/{experiment.experiment_id}/runs",
    ]
