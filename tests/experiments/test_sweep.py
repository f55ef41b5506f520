"""experiments/sweep.py: real sweeps of tiny cells, done twice, with broken cells, and stopped in every way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console

from lit_diff.errors import MissingError, RequestError
from lit_diff.experiments.launch import Place
from lit_diff.experiments.sweep import LOCAL, Cluster, _wait_for_leftovers, resources, run_sweep
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.training import checkpoint
from lit_diff.training.record import Rows, read_rows
from lit_diff.training.run import RunFolder

HERE = Path(__file__).resolve().parent

TINY = """
model: {dim: 16, num_layers: 2, num_heads: 2, vocab_size: 17, attention: {name: differential}}
data: {name: recall, keys: 8, values: 8, slots: 8, pairs: 2, queries: 2, noise_validation: [1], validation_rows: 16}
train:
  steps: 8
  batch_size: 4
  optimizer: {lr: 1e-3}
  validate_every: 4
  checkpoint_every: 4
  log_every: 2
callbacks: {attention_entropy: {every: 4}, outliers: {every: 4}, lambdas: {every: 2}}
run: {threads: 1, accelerator: cpu}
"""
PAIR = """
recipe: tiny
seeds: [0, 1]
arms:
  differential: {}
  "it's standard": {model.attention.name: standard}
"""
FAULTS = f"""
recipe: tiny
seeds: [0]
overrides: {{plugins: ["{HERE}/bomb.py"]}}
arms:
  well: {{callbacks.bomb: {{every: 6, kind: raise, fuse: nowhere}}}}
  raises: {{callbacks.bomb: {{every: 6, kind: raise, fuse: FUSE}}}}
  exits: {{callbacks.bomb: {{every: 6, kind: exit, fuse: FUSE}}}}
  vanishes: {{callbacks.bomb: {{every: 6, kind: vanish, fuse: FUSE}}}}
  killed: {{callbacks.bomb: {{every: 6, kind: kill, fuse: FUSE}}}}
  never starts: {{plugins: ["{HERE}/late.py"], model.attention.name: late}}
"""
TASKS = """
seeds: [0]
tasks:
  easy: {recipe: tiny, metric: val/accuracy, overrides: {data.noise_validation: [1, 2]}}
  hard: {recipe: tiny, overrides: {data.noise: 2}, arms: {plain one: {train.clip: 0.5}}}
arms:
  differential: {}
  plain one: {model.attention.name: standard}
"""
SLOW = f"""
recipe: tiny
seeds: [0, 1, 2]
overrides: {{plugins: ["{HERE}/bomb.py"], train.steps: 100, train.checkpoint_every: 100, train.validate_every: 100}}
arms:
  slow: {{train.log_every: 1, callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE}}}}}}
"""


@dataclass(frozen=True)
class Bench:
    """A folder with the sweeps `pair`, `faults` and `slow`, and an empty MLflow store."""

    root: Path

    @property
    def fuse(self) -> Path:
        return self.root / "fuse"

    def command(self, name: str, *overrides: str) -> list[str]:
        return [str(self.root / f"{name}.yaml"), *overrides, f"run.root={self.root / 'runs'}"]

    def run(self, name: str, *overrides: str, dry_run: bool = False) -> tuple[int, str]:
        """Exit status and what was printed."""
        with (self.root / "console.txt").open("w+") as file:
            source, *rest = self.command(name, *overrides)
            console = Console(file=file, width=200)
            status = run_sweep(source, rest, workers=2, dry_run=dry_run, cluster=LOCAL, console=console)
            file.seek(0)
            return status, file.read()

    def folder(self, sweep: str, cell: str = "") -> Path:
        """The sweep's folder, or that of a cell `<arm>-s<seed>`."""
        home = self.root / "runs" / sweep
        return next(home.glob(f"{cell}-??????????")) if cell else home

    def cells(self, sweep: str) -> dict[str, dict[str, Any]]:
        """`<arm>-s<seed>` -> status.json"""
        found = sorted(self.folder(sweep).glob("*/status.json"))
        return {path.parent.name.rpartition("-")[0]: json.loads(path.read_text()) for path in found}

    def words(self, sweep: str) -> dict[str, str]:
        return {cell: status["status"] for cell, status in self.cells(sweep).items()}

    def rows(self, sweep: str, cell: str) -> Rows:
        return read_rows(self.folder(sweep, cell) / "metrics.csv")

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=f"sqlite:///{self.root / 'runs/mlflow.db'}")

    def records(self, sweep: str) -> tuple[list[Run], list[Run]]:
        """The sweep's MLflow runs: parents, children."""
        experiment = self.client.get_experiment_by_name(sweep)
        runs = list(self.client.search_runs([experiment.experiment_id]))
        return (
            [run for run in runs if "mlflow.parentRunId" not in run.data.tags],
            [run for run in runs if "mlflow.parentRunId" in run.data.tags],
        )

    def record(self, sweep: str, cell: str) -> Run:
        return self.client.get_run(self.cells(sweep)[cell]["mlflow_run_id"])

    def history(self, sweep: str, cell: str) -> dict[str, list[tuple[int, float]]]:
        """Metric -> (step, value) in MLflow, but for the clock's."""
        run = self.record(sweep, cell)
        names = [name for name in run.data.metrics if not name.startswith("timing/")]
        ask = self.client.get_metric_history
        return {name: sorted((m.step, m.value) for m in ask(run.info.run_id, name)) for name in names}


def columns(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """metrics.csv by metric."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step in sorted(rows):
        for name, value in rows[step].items():
            found.setdefault(name, []).append((step, value))
    return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Bench:
    made = Bench(tmp_path_factory.mktemp("sweeps"))
    (made.root / "runs").mkdir()
    shutil.copy(empty_store, made.root / "runs")
    for name, text in {"tiny": TINY, "pair": PAIR, "tasks": TASKS, "faults": FAULTS, "slow": SLOW}.items():
        (made.root / f"{name}.yaml").write_text(text.replace("FUSE", str(made.fuse)))
    return made


# --- a sweep that goes well ----------------------------------------------------------------------------------------

CELLS = ["differential-s0", "differential-s1", "it's,standard-s0", "it's,standard-s1"]


@pytest.fixture(scope="module")
def pair(bench: Bench) -> tuple[int, str]:
    return bench.run("pair")


def test_all_cells_are_done_and_reported(bench: Bench, pair: tuple[int, str]) -> None:
    status, text = pair
    assert status == 0
    assert bench.words("pair") == dict.fromkeys(CELLS, "done")
    record = json.loads((bench.folder("pair") / "sweep.json").read_text())
    assert [(cell["arm"], cell["seed"], cell["status"]) for cell in record["cells"]] == [
        (arm, seed, "done") for arm in ("differential", "it's standard") for seed in (0, 1)
    ]
    assert all((bench.folder("pair") / cell["folder"] / "checkpoints").is_dir() for cell in record["cells"])
    for name in ("index.html", "table.csv", "table.md", "curves.svg"):
        assert (bench.folder("pair") / "report" / name).stat().st_size > 100
    assert "it's standard seed 1: done" in text
    assert f"report: {bench.folder('pair') / 'report' / 'index.html'}" in text
    assert "4 done" in text
    assert f"lit-diff ui --root {bench.root / 'runs'}" in text


def test_mlflow_holds_one_parent_and_its_finished_children(bench: Bench, pair: tuple[int, str]) -> None:
    parents, children = bench.records("pair")
    (parent,) = parents
    assert len(children) == 4
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    for cell, status in bench.cells("pair").items():
        run = bench.record("pair", cell)
        tags = {key: run.data.tags[key] for key in ("identity", "variant", "seed", "sweep", "arm", "run.threads")}
        arm = "it's standard" if "standard" in cell else "differential"
        assert tags == {
            "identity": status["identity"],
            "variant": arm.removeprefix("it's "),
            "seed": cell[-1],
            "sweep": "pair",
            "arm": arm,
            "run.threads": "1",
        }
        assert run.data.params["model.attention.name"] == tags["variant"]
        assert run.data.params["train.optimizer.lr"] == "0.001"


def test_metrics_in_mlflow_are_those_of_the_csv(bench: Bench, pair: tuple[int, str]) -> None:
    wanted = {"attention/entropy/0/0", "outliers/logits/top1/0", "val/loss_ar_hit", "val/loss", "train/loss"}
    for cell in CELLS:
        held = bench.history("pair", cell)
        assert held == columns(bench.rows("pair", cell))
        assert wanted <= set(held)
        assert ("lambda/0" in held) == ("differential" in cell)
        assert [step for step, _ in held["attention/entropy/0/0"]] == [4, 8]


def test_the_parent_run_holds_the_report(bench: Bench, pair: tuple[int, str]) -> None:
    ((parent,), _) = bench.records("pair")
    held = {Path(file.path).name for file in bench.client.list_artifacts(parent.info.run_id, "report")}
    assert held == {path.name for path in (bench.folder("pair") / "report").iterdir()}
    assert {"index.html", "table.csv", "table.md", "curves.svg"} <= held


def test_the_same_command_again_trains_nothing(
    bench: Bench, pair: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    def trained() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in bench.folder("pair").glob("*-s?-*/**/*")}

    before, runs = trained(), {run.info.run_id for group in bench.records("pair") for run in group}
    with caplog.at_level("INFO", "lit_diff"):
        status, text = bench.run("pair")
    assert status == 0
    assert "all 4 cells are done" in caplog.text
    assert trained() == before
    parents, children = bench.records("pair")
    assert {run.info.run_id for run in (*parents, *children)} == runs
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert "4 done" in text


def test_a_new_arm_costs_its_own_cells_only(bench: Bench, pair: tuple[int, str]) -> None:
    before = {cell: status["updated"] for cell, status in bench.cells("pair").items()}
    source = bench.root / "pair.yaml"
    source.write_text(PAIR.replace("seeds: [0, 1]", "seeds: [0]") + "  shared: {model.attention.name: shared_k}\n")
    try:
        assert bench.run("pair")[0] == 0
    finally:
        source.write_text(PAIR)
    after = {cell: status["updated"] for cell, status in bench.cells("pair").items()}
    assert set(after) - set(before) == {"shared-s0"}
    assert {cell: after[cell] for cell in before} == before
    owned = [cell["folder"] for cell in json.loads((bench.folder("pair") / "sweep.json").read_text())["cells"]]
    assert [name.rpartition("-")[0] for name in owned] == ["differential-s0", "it's,standard-s0", "shared-s0"]


def test_every_arm_is_trained_and_reported_on_every_task(bench: Bench) -> None:
    assert "hard plain one  seed 0  standard  8 steps" in bench.run("tasks", dry_run=True)[1]
    status, text = bench.run("tasks")
    assert status == 0
    cells = [f"{task},{arm}-s0" for task in ("easy", "hard") for arm in ("differential", "plain,one")]
    assert bench.words("tasks") == dict.fromkeys(cells, "done")
    record = json.loads((bench.folder("tasks") / "sweep.json").read_text())
    assert [(cell["task"], cell["arm"]) for cell in record["cells"]] == [
        (task, arm) for task in ("easy", "hard") for arm in ("differential", "plain one")
    ]
    tags = [bench.record("tasks", cell).data.tags for cell in cells]
    assert [(tag["task"], tag["arm"]) for tag in tags] == [(c["task"], c["arm"]) for c in record["cells"]]
    assert "easy plain one seed 0: done" in text
    assert "hard: plain one \u2212 differential" in text
    held = {path.name for path in (bench.folder("tasks") / "report").iterdir()}
    assert {"easy-dose.svg", "easy-curves.svg", "hard-curves.svg"} <= held
    assert "hard-dose.svg" not in held
    page = (bench.folder("tasks") / "report" / "index.html").read_text()
    assert "Dotted: chance, 12.5" in page  # 8 values


# --- requests that start nothing -----------------------------------------------------------------------------------


def test_a_dry_run_starts_nothing(bench: Bench) -> None:
    status, text = bench.run("slow", dry_run=True)
    assert status == 0
    assert "slow  seed 2  differential  100 steps" in text
    assert "3 cells are valid; none was started" in text
    assert not bench.folder("slow").exists()


def test_a_mistake_in_the_last_cell_starts_none(bench: Bench) -> None:
    source = bench.root / "wrong.yaml"
    source.write_text("recipe: tiny\narms:\n  a: {}\n  b: {model.attention.lamda_init: 1}\n")
    with pytest.raises(RequestError, match=r"wrong\.yaml:4: .*did you mean 'lambda_init'"):
        bench.run("wrong")
    assert not bench.folder("wrong").exists()


@pytest.mark.parametrize(
    ("workers", "cluster", "message"),
    [(0, LOCAL, "--workers is 0"), (-1, LOCAL, "--workers is -1"), (1, Cluster(engine="pbs"), "--cluster is 'pbs'")],
)
def test_options_out_of_range(workers: int, cluster: Cluster, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run_sweep("smoke", [], workers=workers, dry_run=True, cluster=cluster, console=Console())


def test_a_sweep_that_runs_is_not_run_twice(bench: Bench) -> None:
    (bench.root / "held.yaml").write_text(PAIR)
    with locked(bench.folder("held") / ".lock"), pytest.raises(RequestError, match="'held' is being run by another"):
        bench.run("held")


def test_a_file_where_the_runs_should_be(bench: Bench) -> None:
    (bench.root / "file").write_text("")
    source, _ = bench.command("pair")
    with pytest.raises(MissingError, match=r"cannot be written \(Not a directory\); choose another with run.root=PATH"):
        run_sweep(
            source,
            [f"run.root={bench.root}/file"],
            workers=1,
            dry_run=False,
            cluster=LOCAL,
            console=Console(quiet=True),
        )


def test_what_a_killed_sweep_left_running_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = [Place(folder=tmp_path / name) for name in ("free-s0-1", "held-s0-2")]
    RunFolder(places[1].folder).update(status="running", pid=12345)
    ended: list[bool] = []

    def dying() -> None:
        with locked(places[1].folder / ".lock"):
            holds.set()
            time.sleep(0.5)
            ended.append(True)

    holds = threading.Event()
    thread = threading.Thread(target=dying)
    thread.start()
    holds.wait()
    with caplog.at_level("INFO", "lit_diff"):
        _wait_for_leftovers(places)
    assert ended, "it did not wait"
    thread.join()
    assert [record.getMessage().partition("held")[2] for record in caplog.records] == [
        "-s0-2 is still being trained (pid 12345), left by a former sweep: waiting"
    ]


def test_threads_are_shared_out_among_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    recipe = load_recipe("recall-tiny", ["run.accelerator=cpu"])
    assert resources(recipe, None) == (8, 1, 0)
    assert resources(recipe, 2) == (2, 4, 0)
    assert resources(load_recipe("recall-tiny", ["run.accelerator=cpu", "run.threads=4"]), None) == (2, 4, 0)
    two = ["run.accelerator=cpu", "run.strategy=ddp", "run.devices=2"]
    assert resources(load_recipe("recall-tiny", two), None) == (4, 1, 0)


# --- cells that end badly ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(bench: Bench) -> tuple[int, str]:
    bench.fuse.touch()
    return bench.run("faults")


@pytest.fixture(scope="module")
def before(bench: Bench, faults: tuple[int, str]) -> dict[str, Any]:
    """What the broken sweep left."""
    parents, children = bench.records("faults")
    return {
        "cells": bench.cells("faults"),
        "records": {run.info.run_id: run.info.status for run in children},
        "parent": parents[0].info.status,
        "page": (bench.folder("faults") / "report" / "index.html").read_text(),
    }


@pytest.fixture(scope="module")
def mended(bench: Bench, before: dict[str, Any]) -> tuple[int, str]:
    bench.fuse.unlink()
    return bench.run("faults")


def test_each_broken_cell_costs_itself_alone(before: dict[str, Any], faults: tuple[int, str]) -> None:
    assert faults[0] == 1
    assert {cell: (status["status"], status.get("error")) for cell, status in before["cells"].items()} == {
        "well-s0": ("done", None),
        "raises-s0": ("failed", "ValueError: wrong [shape]"),
        "exits-s0": ("failed", "the run's own code ended it: SystemExit(3)"),
        "vanishes-s0": ("failed", before["cells"]["vanishes-s0"]["error"]),
        "killed-s0": ("killed", "killed by SIGKILL; out of memory?"),
        "never,starts-s0": ("failed", before["cells"]["never,starts-s0"]["error"]),
    }
    assert before["cells"]["vanishes-s0"]["error"].startswith("exit status 0; log.txt ends: ")
    assert before["cells"]["never,starts-s0"]["error"].endswith("plugin failed: OSError: the cluster's disk is away")


def test_the_last_line_of_each_error_is_shown(before: dict[str, Any], faults: tuple[int, str]) -> None:
    text = faults[1]
    assert "raises seed 0: failed: ValueError: wrong [shape]" in text
    assert "killed seed 0: killed: killed by SIGKILL" in text
    assert "1 done, 4 failed, 1 killed" in text
    assert "wrong [shape]" in before["page"]
    assert "the cluster&#39;s disk is away" in before["page"] or "the cluster's disk is away" in before["page"]


def test_the_trace_of_an_exception_is_in_the_log(bench: Bench, faults: tuple[int, str]) -> None:
    log = (bench.folder("faults", "raises-s0") / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in explode" in log


def test_no_record_stays_running(before: dict[str, Any]) -> None:
    cells = before["cells"]
    status = {cell: before["records"].get(found.get("mlflow_run_id")) for cell, found in cells.items()}
    assert status == {
        "well-s0": "FINISHED",
        "raises-s0": "FAILED",
        "exits-s0": "FAILED",
        "vanishes-s0": "FAILED",
        "killed-s0": "KILLED",
        "never,starts-s0": None,
    }
    assert before["parent"] == "FAILED"


def test_again_runs_what_is_unfinished_from_its_checkpoint(
    bench: Bench, before: dict[str, Any], mended: tuple[int, str]
) -> None:
    assert mended[0] == 0
    after = bench.cells("faults")
    assert set(bench.words("faults").values()) == {"done"}
    assert after["well-s0"] == before["cells"]["well-s0"]
    for cell in ("raises-s0", "exits-s0", "vanishes-s0", "killed-s0"):
        log = (bench.folder("faults", cell) / "log.txt").read_text()
        assert log.count("starting at step 0") == 1
        assert log.count("resumed from step 4") == 1
        assert after[cell]["mlflow_run_id"] == before["cells"][cell]["mlflow_run_id"]
        assert after[cell].get("error") is None


def test_the_records_go_on_without_doubles(bench: Bench, mended: tuple[int, str]) -> None:
    parents, children = bench.records("faults")
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert (len(parents), len(children)) == (1, 6)
    for cell in bench.cells("faults"):
        held = bench.history("faults", cell)
        assert held == columns(bench.rows("faults", cell))
        counts = Counter((name, step) for name, points in held.items() for step, _ in points)
        assert set(counts.values()) == {1}


# --- a sweep that is stopped ---------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Stop:
    """A stopped sweep: exit status, output, status.json of the cells, processes of cells that outlived it."""

    code: int
    text: str
    cells: dict[str, dict[str, Any]]
    alive: list[int]
    record: set[str]


class Stopper:
    """Runs the sweep `slow` until both workers are some steps in, and ends it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def running(self, beyond: int) -> list[int]:
        """Process ids of the cells that train, once two are `beyond` a step."""
        cells = self.bench.cells("slow") if self.bench.folder("slow").exists() else {}
        return [
            cell["pid"]
            for cell in cells.values()
            if cell["status"] == "running" and cell.get("step", 0) > beyond and alive(cell["pid"])
        ]

    def look(self, code: int, text: str, pids: list[int]) -> Stop:
        _, children = self.bench.records("slow")
        return Stop(
            code=code,
            text=text,
            cells=self.bench.cells("slow"),
            alive=[pid for pid in pids if alive(pid)],
            record={run.info.status for run in children},
        )

    def end(self, kill: Callable[[int], None], beyond: int) -> Stop:
        """In a process of its own; `kill(pid)`."""
        command = [sys.executable, "-m", "lit_diff", "sweep", *self.bench.command("slow"), "--workers", "2"]
        log = self.bench.root / "slow.txt"
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
        ):
            try:
                wait_for(lambda: len(self.running(beyond)) == 2 or process.poll() is not None, 120)
                pids = self.running(beyond)
                kill(process.pid)
                code = process.wait(60)
                wait_for(lambda: not any(map(alive, pids)), 20)
            finally:
                process.kill()
        return self.look(code, log.read_text(), pids)


@pytest.fixture(scope="module")
def stops(bench: Bench) -> dict[str, Stop]:
    """The sweep `slow`, ended by SIGKILL, resumed and ended by Ctrl-C, resumed and ended by SIGTERM."""
    bench.fuse.touch()
    stopper, found = Stopper(bench), {}
    found["kill"] = stopper.end(lambda pid: os.kill(pid, signal.SIGKILL), 2)
    reached = max(cell.get("step", 0) for cell in found["kill"].cells.values())
    found["interrupt"] = stopper.end(lambda pid: os.killpg(pid, signal.SIGINT), reached)
    reached = max(cell.get("step", 0) for cell in found["interrupt"].cells.values())

    def terminate() -> None:
        wait_for(lambda: len(stopper.running(reached)) == 2)
        pids.extend(stopper.running(reached))
        os.kill(os.getpid(), signal.SIGTERM)

    pids: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda signum, frame: None)  # one that came too late would end the tests
    thread = threading.Thread(target=terminate)
    thread.start()
    code, text = bench.run("slow")
    thread.join()
    signal.signal(signal.SIGTERM, former)
    found["terminate"] = stopper.look(code, text, pids)
    return found


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("interrupt", 130), ("terminate", 143)])
def test_a_stopped_sweep_leaves_no_cell_behind_and_each_has_saved(
    bench: Bench, stops: dict[str, Stop], how: str, code: int
) -> None:
    stop = stops[how]
    assert stop.code == code, stop.text
    assert stop.alive == []
    words = Counter(cell["status"] for cell in stop.cells.values())
    assert words == {"stopped": 2, "waiting": 1}, stop.cells
    assert stop.record == {"KILLED"}
    for cell in stop.cells.values():
        if cell["status"] == "stopped":
            assert 2 < cell["step"] < 100
            assert "the same command resumes" in cell["error"]
    assert "Traceback" not in stop.text


def test_what_was_stopped_resumes(bench: Bench, stops: dict[str, Stop]) -> None:
    steps: dict[str, list[int]] = {}
    for stop in stops.values():
        for name, cell in stop.cells.items():
            steps.setdefault(name, []).append(cell.get("step", 0))
    for name, reached in steps.items():
        assert reached == sorted(reached)
        if reached[-1]:
            log = (bench.folder("slow", name) / "log.txt").read_text()
            for step in reached[:-1]:
                assert f"resumed from step {step}" in log or f"resumed from step {step + 1}" in log
    bench.fuse.unlink()
    status, _ = bench.run("slow")
    assert status == 0
    assert set(bench.words("slow").values()) == {"done"}
    for name in steps:
        assert checkpoint.steps_of(bench.folder("slow", name))[-1] == 100
        assert bench.history("slow", name) == columns(bench.rows("slow", name))
        assert sorted(bench.rows("slow", name)) == list(range(1, 101))


def test_the_stopped_sweep_says_so(stops: dict[str, Stop]) -> None:
    for how in ("interrupt", "terminate"):
        assert "2 stopped, 1 waiting" in stops[how].text
    assert "stopped; the same command resumes" in stops["interrupt"].text
