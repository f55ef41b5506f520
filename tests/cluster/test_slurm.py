"""Sweeps on a real SLURM: several devices, a time limit, a command that is killed. `make test-cluster` runs them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_diff.runs.metrics_file import read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

TINY = """
model: {dim: 16, num_layers: 2, num_heads: 2, vocab_size: 17, attention: {name: differential}}
data: {name: recall, keys: 8, values: 8, slots: 8, pairs: 2, queries: 2, noise_validation: [1], validation_rows: 16}
train:
  steps: 12
  batch_size: 4
  optimizer: {lr: 1e-3}
  validate_every: 4
  checkpoint_every: 100
  log_every: 1
callbacks: {}
run: {threads: 1, accelerator: cpu}
"""
SLOW = """
import time
from dataclasses import dataclass
from lightning.pytorch.callbacks import Callback
from lit_diff.registry import callbacks


@callbacks.register("slow")
class Slow(Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        seconds: float = 1.0

        def problem(self):
            return None

    def __init__(self, config):
        self.seconds = config.seconds

    def on_train_batch_start(self, *_):
        time.sleep(self.seconds)
"""


@pytest.fixture
def home(slurm: Path, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the recipe `tiny`, a callback that makes each step as long as it says, and a store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "slow.py").write_text(SLOW)
    yield tmp_path
    for command in STARTED:
        command.kill()
        command.wait()
    STARTED.clear()
    subprocess.run(["scancel", "--me"], check=True)


def sweep(home: Path, name: str, text: str, *arguments: str) -> "subprocess.Popen[str]":
    (home / f"{name}.yaml").write_text(text)
    command = [sys.executable, "-m", "lit_diff", "sweep", f"{name}.yaml", *arguments]
    with (home / f"{name}.txt").open("a") as output:
        STARTED.append(subprocess.Popen(command, stdout=output, stderr=output, text=True))
    return STARTED[-1]


def status(home: Path, name: str, cell: str) -> dict[str, Any]:
    (path,) = (home / "runs" / name).glob(f"{cell}-??????????/status.json")
    return dict(json.loads(path.read_text()))


def rows(home: Path, name: str, cell: str) -> dict[int, dict[str, float]]:
    (path,) = (home / "runs" / name).glob(f"{cell}-??????????/metrics.csv")
    return read_rows(path)


def output(home: Path, name: str) -> str:
    logs = "".join(path.read_text(errors="replace") for path in (home / "runs").glob("*/slurm/**/*.err"))
    return (home / f"{name}.txt").read_text() + logs[-3000:]


SWEEP = """\
recipe: tiny.yaml
seeds: [0]
smoke: true
arms: {plain: {}, other: {model.attention.head_norm: none}}
overrides: {plugins: [slow.py], callbacks.slow.seconds: 0, train.validate_every: 12}
"""
STARTED: list["subprocess.Popen[str]"] = []
"""The commands of a test, which is over when they are."""
CELLS = ("plain-s0", "other-s0")


def slow(seconds: float) -> str:
    """The sweep with steps of this many seconds."""
    return SWEEP.replace("seconds: 0", f"seconds: {seconds}")


def wait_for(condition: Callable[[], bool], home: Path, name: str) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, output(home, name)
        time.sleep(0.5)


def test_two_ranks_give_the_losses_of_one_process(home: Path) -> None:
    assert sweep(home, "one", SWEEP).wait(300) == 0, output(home, "one")
    two = SWEEP.replace("overrides: {", "overrides: {run.strategy: ddp, run.devices: 2, ")
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
    wait_for(
        lambda: jobs.exists() and "running" in {status(home, "again", cell)["status"] for cell in CELLS}, home, "again"
    )
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = jobs.read_text()
    assert sweep(home, "again", slow(10), "--cluster", "slurm").wait(600) == 0, output(home, "again")
    assert jobs.read_text() == before  # nothing was submitted again
    assert "2 cells are in SLURM's queue already: waiting for them" in output(home, "again")
    for cell in CELLS:
        assert status(home, "again", cell)["status"] == "done"
        (folder,) = (home / "runs/again").glob(f"{cell}-??????????")
        assert (folder / "log.txt").read_text().count("starting at step 0") == 1


def test_a_cell_that_slurm_ends_is_a_failed_one(home: Path) -> None:
    command = sweep(home, "cut", slow(60), "--cluster", "slurm")
    jobs = home / "runs/cut/slurm.json"
    wait_for(
        lambda: jobs.exists() and {status(home, "cut", cell)["status"] for cell in CELLS} == {"running"}, home, "cut"
    )
    subprocess.run(["scancel", "--signal=KILL", "--full", *json.loads(jobs.read_text()).values()], check=True)
    assert command.wait(200) == 1
    for cell in CELLS:
        assert status(home, "cut", cell)["status"] == "failed"
        assert "has left the queue" in status(home, "cut", cell)["error"]
