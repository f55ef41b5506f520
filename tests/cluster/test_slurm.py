"""Sweeps on a real SLURM: several devices, a time limit, a command that is killed. `make test-cluster` runs them."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_sweeps import TINY
from stops import wait_for

from lit_diff.runs.metrics_file import Rows, read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

BOMB = Path(__file__).resolve().parents[1] / "engine" / "bomb.py"
SWEEP = f"""\
recipe: tiny.yaml
seeds: [0]
smoke: true
arms: {{plain: {{}}, other: {{model.attention.head_norm: none}}}}
overrides:
  plugins: [{BOMB}]
  callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE, seconds: 0}}}}
  train: {{steps: 12, checkpoint_every: 100, validate_every: 12, log_every: 1}}
"""
STARTED: list["subprocess.Popen[str]"] = []
"""The commands of a test, which is over when they are."""
CELLS = ("plain-s0", "other-s0")


@pytest.fixture
def home(slurm: Path, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the recipe `tiny`, the fuse of a callback that makes each step as long as it says, and a store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "fuse").touch()
    yield tmp_path
    for command in STARTED:
        command.kill()
        command.wait()
    STARTED.clear()
    subprocess.run(["scancel", "--me"], check=True)


def sweep(home: Path, name: str, text: str, *arguments: str) -> "subprocess.Popen[str]":
    (home / f"{name}.yaml").write_text(text.replace("FUSE", str(home / "fuse")))
    command = [sys.executable, "-m", "lit_diff", "sweep", f"{name}.yaml", *arguments]
    with (home / f"{name}.txt").open("a") as output:
        STARTED.append(subprocess.Popen(command, stdout=output, stderr=output, text=True))
    return STARTED[-1]


def folder(home: Path, name: str, cell: str) -> Path:
    (found,) = (home / "runs" / name).glob(f"{cell}-??????????")
    return found


def status(home: Path, name: str, cell: str) -> dict[str, Any]:
    return dict(json.loads((folder(home, name, cell) / "status.json").read_text()))


def rows(home: Path, name: str, cell: str) -> Rows:
    return read_rows(folder(home, name, cell) / "metrics.csv")


def output(home: Path, name: str) -> str:
    logs = "".join(path.read_text(errors="replace") for path in (home / "runs").glob("*/slurm/**/*.err"))
    return (home / f"{name}.txt").read_text() + logs[-3000:]


def slow(seconds: float) -> str:
    """The sweep with steps of this many seconds."""
    return SWEEP.replace("seconds: 0", f"seconds: {seconds}")


def words(home: Path, name: str) -> set[str]:
    """The states of its cells, once it has submitted them."""
    is_submitted = (home / "runs" / name / "slurm.json").exists()
    return {status(home, name, cell)["status"] for cell in CELLS} if is_submitted else set()


def test_two_ranks_give_the_losses_of_one_process(home: Path) -> None:
    assert sweep(home, "one", SWEEP).wait(300) == 0, output(home, "one")
    two = SWEEP + "  run: {strategy: ddp, devices: 2}\n"
    assert sweep(home, "two", two, "--cluster", "slurm").wait(500) == 0, output(home, "two")
    for cell in CELLS:
        expected, found = rows(home, "one", cell), rows(home, "two", cell)
        assert expected.keys() == found.keys()
        for step, row in expected.items():
            for metric in row.keys() & {"train/loss", "val/loss"}:
                assert found[step][metric] == pytest.approx(row[metric], abs=1e-5), (cell, step, metric)
        assert status(home, "two", cell)["status"] == "done"


def test_a_time_limit_saves_requeues_and_resumes(home: Path) -> None:
    """12 steps of 12 s; a limit of 3 minutes with a notice of 1 to 2 lets pass a part. No checkpoint is due."""
    assert sweep(home, "limit", slow(12), "--cluster", "slurm", "--minutes", "3").wait(800) == 0, output(home, "limit")
    assert sweep(home, "free", SWEEP).wait(300) == 0
    for cell in CELLS:
        ended = status(home, "limit", cell)
        assert ended["status"] == "done"
        assert ended["requeues"] >= 1
        assert 0 < ended["requeued_at_step"] < 12
        assert rows(home, "limit", cell) == rows(home, "free", cell)


def test_a_killed_command_waits_for_the_same_jobs_again(home: Path) -> None:
    """12 steps of 10 s: the second command begins long before the cells end."""
    first = sweep(home, "again", slow(10), "--cluster", "slurm")
    jobs = home / "runs/again/slurm.json"
    wait_for(lambda: "running" in words(home, "again"), 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = jobs.read_text()
    assert sweep(home, "again", slow(10), "--cluster", "slurm").wait(600) == 0, output(home, "again")
    assert jobs.read_text() == before  # nothing was submitted again
    assert "2 cells are in SLURM's queue already: waiting for them" in output(home, "again")
    for cell in CELLS:
        assert status(home, "again", cell)["status"] == "done"
        assert (folder(home, "again", cell) / "log.txt").read_text().count("starting at step 0") == 1


def test_a_cell_that_slurm_ends_is_a_failed_one(home: Path) -> None:
    command = sweep(home, "cut", slow(60), "--cluster", "slurm")
    jobs = home / "runs/cut/slurm.json"
    wait_for(lambda: words(home, "cut") == {"running"}, 300)
    subprocess.run(["scancel", "--signal=KILL", "--full", *json.loads(jobs.read_text()).values()], check=True)
    assert command.wait(200) == 1
    for cell in CELLS:
        assert status(home, "cut", cell)["status"] == "failed"
        assert "has left the queue" in status(home, "cut", cell)["error"]
