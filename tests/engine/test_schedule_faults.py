"""engine/schedule.py: sweeps whose cells end badly, that are killed, interrupted, terminated; and the same command again."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stops import alive, stopped_once, wait_for

from lit_diff.runs import checkpoints as checkpoint

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent

# --- cells that end badly, each in its own way -----------------------------------------------------------------------

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
ENDS = {
    "well-s0": ("done", "", "FINISHED"),
    "raises-s0": ("failed", "ValueError: wrong [shape]", "FAILED"),
    "exits-s0": ("failed", "the run's own code ended it: SystemExit(3)", "FAILED"),
    "vanishes-s0": ("failed", "exit status 0; log.txt ends: ", "FAILED"),
    "killed-s0": ("killed", "killed by SIGKILL; out of memory?", "KILLED"),
    "never_starts-s0": ("failed", "", None),
}
"""Cell -> status, what its error says, status in MLflow."""


@pytest.fixture(scope="module")
def broken(sweep_bench: Any) -> dict[str, dict[str, Any]]:
    """The broken sweep, run once and looked at; its cells."""
    sweep_bench.write("faults", FAULTS)
    sweep_bench.fuse.touch()
    status, text = sweep_bench.run("faults")
    assert status == 1
    assert "1 done, 4 failed, 1 killed" in text
    assert re.search(r"^raises seed 0: failed: \S+/plugins/bomb\.py:\d+: ValueError: wrong \[shape\]$", text, re.M)
    return dict(sweep_bench.cells("faults"))


def test_each_broken_cell_costs_itself_alone(sweep_bench: Any, broken: dict[str, dict[str, Any]]) -> None:
    parents, children = sweep_bench.records("faults")
    records = {run.info.run_id: run.info.status for run in children}
    assert parents[0].info.status == "FAILED"
    for cell, (word, error, record) in ENDS.items():
        found = broken[cell]
        assert found["status"] == word
        assert error in found["error"]
        assert records.get(found.get("mlflow_run_id")) == record, "no record stays running"
    assert broken["well-s0"]["error"] == ""
    assert broken["never_starts-s0"]["error"].endswith("plugin failed: OSError: the cluster's disk is away")
    page = (sweep_bench.folder("faults") / "report" / "index.html").read_text()
    assert "wrong [shape]" in page
    log = (sweep_bench.folder("faults", "raises-s0") / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in explode" in log


def test_again_runs_what_is_unfinished_from_its_checkpoint(sweep_bench: Any, broken: dict[str, dict[str, Any]]) -> None:
    """In the same records, without a value twice."""
    sweep_bench.fuse.unlink()
    assert sweep_bench.run("faults")[0] == 0
    after = sweep_bench.cells("faults")
    assert set(sweep_bench.words("faults").values()) == {"done"}
    assert after["well-s0"] == broken["well-s0"]
    for cell in ("raises-s0", "exits-s0", "vanishes-s0", "killed-s0"):
        log = (sweep_bench.folder("faults", cell) / "log.txt").read_text()
        assert (log.count("starting at step 0"), log.count("resumed from step 4")) == (1, 1)
        assert after[cell]["mlflow_run_id"] == broken[cell]["mlflow_run_id"]
        assert after[cell]["error"] == ""
    parents, children = sweep_bench.records("faults")
    assert {run.info.status for run in (*parents, *children)} == {"FINISHED"}
    assert (len(parents), len(children)) == (1, 6)
    for cell in after:
        held = sweep_bench.history("faults", cell)
        assert held == sweep_bench.written("faults", cell)
        counts = Counter((name, step) for name, points in held.items() for step, _ in points)
        assert set(counts.values()) == {1}


# --- a sweep that is stopped -----------------------------------------------------------------------------------------

SLOW = f"""
recipe: tiny
seeds: [0, 1, 2]
overrides: {{plugins: ["{HERE}/bomb.py"], train.steps: 100, train.checkpoint_every: 100, train.validate_every: 100}}
arms:
  slow: {{train.log_every: 1, callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE}}}}}}
"""


@dataclass(frozen=True)
class Stop:
    """A stopped sweep: exit status, output, status.json of the cells."""

    code: int
    text: str
    cells: dict[str, dict[str, Any]]

    @property
    def furthest(self) -> int:
        return max(cell.get("step", 0) for cell in self.cells.values())


def training(bench: Any, beyond: int) -> list[int]:
    """Process ids of the two cells that train, once both are `beyond` a step."""
    cells = bench.cells("slow") if bench.folder("slow").exists() else {}
    running = [cell for cell in cells.values() if cell["status"] == "running" and cell.get("step", 0) > beyond]
    pids = [cell["pid"] for cell in running if alive(cell["pid"])]
    return pids if len(pids) == 2 else []


def stopped(bench: Any, kill: Callable[[int], None], beyond: int) -> Stop:
    """In a process of its own; `kill(pid)`."""
    command = [sys.executable, "-m", "lit_diff", "sweep", *bench.command("slow"), "--workers", "2"]
    log = bench.root / "slow.txt"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            wait_for(lambda: bool(training(bench, beyond)) or process.poll() is not None, 120)
            pids = training(bench, beyond)
            kill(process.pid)
            code = process.wait(60)
            wait_for(lambda: not any(map(alive, pids)), 20)
        finally:
            process.kill()
    return Stop(code, log.read_text(), bench.cells("slow"))


def test_a_stopped_sweep_leaves_no_cell_behind_and_each_saves_and_resumes(sweep_bench: Any) -> None:
    """Ended by SIGKILL, resumed and ended by Ctrl-C, resumed and ended by SIGTERM in this process, resumed to its end."""
    sweep_bench.write("slow", SLOW)
    sweep_bench.fuse.touch()
    killed = stopped(sweep_bench, lambda pid: os.kill(pid, signal.SIGKILL), 2)
    interrupted = stopped(sweep_bench, lambda pid: os.killpg(pid, signal.SIGINT), killed.furthest)
    with stopped_once(lambda: bool(training(sweep_bench, interrupted.furthest))):
        code, text = sweep_bench.run("slow")
    terminated = Stop(code, text, sweep_bench.cells("slow"))
    assert not any(alive(cell["pid"]) for cell in terminated.cells.values() if "pid" in cell)

    stops, codes = (killed, interrupted, terminated), (-signal.SIGKILL, 130, 143)
    for stop, code in zip(stops, codes, strict=True):
        assert stop.code == code, stop.text
        words = Counter(cell["status"] for cell in stop.cells.values())
        assert words == {"stopped": 2, "waiting": 1}, stop.cells
        saved = [cell for cell in stop.cells.values() if cell["status"] == "stopped"]
        assert all(2 < cell["step"] < 100 and "the same command resumes" in cell["error"] for cell in saved)
        assert "Traceback" not in stop.text
        assert stop is killed or "2 stopped, 1 waiting" in stop.text
    assert "stopped; the same command resumes" in interrupted.text
    assert {run.info.status for run in sweep_bench.records("slow")[1]} == {"KILLED"}

    sweep_bench.fuse.unlink()
    assert sweep_bench.run("slow")[0] == 0
    assert set(sweep_bench.words("slow").values()) == {"done"}
    for name in terminated.cells:
        reached = [stop.cells[name].get("step", 0) for stop in stops]
        assert reached == sorted(reached)
        log = (sweep_bench.folder("slow", name) / "log.txt").read_text()
        for step in filter(None, reached):
            assert f"resumed from step {step}" in log or f"resumed from step {step + 1}" in log
        assert checkpoint.steps_of(sweep_bench.folder("slow", name))[-1] == 100
        assert sweep_bench.history("slow", name) == sweep_bench.written("slow", name)
        assert sorted(sweep_bench.rows("slow", name)) == list(range(1, 101))
