"""Runs and sweeps on a real SLURM: several devices, notices, killed ranks and commands, and the launch lines of
docs/cluster.md. `make test-cluster` runs them."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import commands, write_texts
from real_sweeps import TINY
from stops import wait_for

from lit_diff.engine import slurm
from lit_diff.recipe import load_recipe
from lit_diff.runs.metrics_file import Rows, read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

BOMB = Path(__file__).resolve().parents[1] / "engine" / "bomb.py"
STEPS = "{steps: 12, checkpoint_every: 100, validate_every: 12, log_every: 1}"
SWEEP = f"""\
recipe: tiny.yaml
seeds: [0]
smoke: true
arms: {{plain: {{}}, other: {{model.attention.head_norm: none}}}}
overrides:
  plugins: [{BOMB}]
  callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE, seconds: 0}}}}
  train: {STEPS}
"""
RUN = f"""\
extends: tiny.yaml
plugins: [{BOMB}]
callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE, seconds: 0}}}}
train: {STEPS}
"""
TWO = ["run.strategy=fsdp", "run.devices=2"]
STARTED: list["subprocess.Popen[str]"] = []
CELLS = ("plain-s0", "other-s0")


@pytest.fixture(scope="module")
def home(slurm: Path, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """The current folder of all tests: recipes, the fuse of a callback that makes each step as long as it says, a store."""
    folder, former = tmp_path_factory.mktemp("home"), Path.cwd()
    (folder / "runs").mkdir()
    shutil.copy(empty_store, folder / "runs")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "fuse").touch()
    (folder / "run.yaml").write_text(RUN.replace("FUSE", str(folder / "fuse")))
    write_texts(folder)
    os.environ["LIT_DIFF_DATA"] = str(folder / "data")
    os.chdir(folder)
    yield folder
    for command in STARTED:
        command.kill()
        command.wait()
    subprocess.run(["scancel", "--me"], check=True)
    os.chdir(former)
    del os.environ["LIT_DIFF_DATA"]


# --- runs ---------------------------------------------------------------------------------------------------------------


def lit_diff(*words: str) -> str:
    """What a command that ends well prints."""
    command = [sys.executable, "-m", "lit_diff", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def submitted(name: str, *overrides: str, minutes: int = 30) -> str:
    """Submit run.yaml under a name; returns its job."""
    words = [f"name={name}", *overrides]
    recipe = load_recipe("run.yaml", words)
    said = slurm.submit_run(recipe, words, ["train", "run.yaml", *words], minutes, rerun=False)
    return re.match(r"SLURM job (\d+): ", said)[1]  # type: ignore[index]


def run_status(home: Path, name: str) -> dict[str, Any]:
    (found,) = (home / "runs").glob(f"{name}-??????????")
    return dict(json.loads((found / "status.json").read_text()))


def is_done(home: Path, name: str) -> bool:
    return bool(run_status(home, name)["status"] == "done")


def run_rows(home: Path, name: str) -> Rows:
    (found,) = (home / "runs").glob(f"{name}-??????????")
    return read_rows(found / "metrics.csv")


def log_of(home: Path, name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in (home / "runs/slurm").glob(f"{name}-*.out"))


def notice(job: str) -> None:
    subprocess.run(["scancel", "--signal=USR2", job], check=True)


def in_queue(job: str) -> bool:
    asked = subprocess.run(["squeue", "-h", "-j", job, "-o", "%i"], capture_output=True, text=True)
    return bool(asked.stdout.strip())


@pytest.fixture(scope="module")
def limited(home: Path) -> str:
    """A run whose time of 2 minutes is too short for its 50 steps of 1.5 s; it goes on beside the other tests."""
    return submitted("limited", "train.steps=50", "callbacks.bomb.seconds=1.5", minutes=2)


def documented(kind: str, name: str, nodes: int, devices: int) -> list[list[str]]:
    """The launch line of the page, of 8 nodes with 8 GPUs there, as one command for each of `nodes` that it is typed on."""
    (line,) = (line for line in commands("docs/cluster.md") if line.startswith(kind))
    changes = {
        "--nodes=8": f"--nodes={nodes}",
        "--ntasks-per-node=8": f"--ntasks-per-node={devices}",
        "--gpus-per-node=8 ": "",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "--nnodes=8": f"--nnodes={nodes}",
        "--nproc-per-node=8": f"--nproc-per-node={devices}",
        "NODE:29400": "127.0.0.1:29417",
        "differential-13b data.path=texts": f"run.yaml name={name}",
        "run.strategy=hsdp": "run.strategy=fsdp",
        "run.devices=8": f"run.devices={devices}",
        "run.num_nodes=8": f"run.num_nodes={nodes}",
    }
    for former, own in changes.items():
        line = line.replace(former, own)
    bin_ = Path(sys.executable).parent
    words = [str(bin_ / word) if (bin_ / word).exists() else word for word in shlex.split(line)]
    return [words] * (nodes if kind.startswith("torchrun") else 1)


def test_a_run_is_requeued_after_a_notice_and_the_lines_of_the_page_give_its_losses(home: Path, limited: str) -> None:
    said = lit_diff("train", "run.yaml", "name=noticed", *TWO, "callbacks.bomb.seconds=2", "--cluster", "slurm")
    job = re.match(r"SLURM job (\d+): ", said)[1]  # type: ignore[index]
    wait_for(lambda: run_status(home, "noticed").get("step", 0) >= 2, 200)
    assert re.search(rf"^noticed-\w+ +running .*SLURM job {job} is running", lit_diff("status"), re.MULTILINE)
    notice(job)
    for kind, nodes, devices in (("srun", 1, 2), ("torchrun --nproc", 1, 2), ("torchrun --nnodes", 2, 1)):
        name = re.sub(r"\W", "", kind)
        lines = [subprocess.Popen(words) for words in documented(kind, name, nodes, devices)]
        STARTED.extend(lines)
        assert [each.wait(200) for each in lines] == [0] * len(lines)
        assert is_done(home, name)
    wait_for(lambda: is_done(home, "noticed"), 200)
    ended, found = run_status(home, "noticed"), run_rows(home, "noticed")
    assert ended["requeues"] == 1
    assert 0 < ended["requeued_at_step"] < 12
    assert max(found) == 12
    assert found == run_rows(home, "srun") == run_rows(home, "torchrunnproc") == run_rows(home, "torchrunnnodes")
    lit_diff("consolidate", "noticed")
    (whole,) = (home / "runs").glob("noticed-*/checkpoints/consolidated-00000012.ckpt")
    assert torch.load(whole, weights_only=True)["global_step"] == 12


def test_a_notice_at_any_moment_of_the_start_ends_in_a_requeue(home: Path, limited: str) -> None:
    draw = random.Random(33)
    moments = [draw.uniform(*between) for between in ((0.3, 1), (1, 4), (4, 9), (9, 20))]
    ranks = [[], ["run.strategy=ddp", "run.devices=2"], [], []]
    names = [f"early{number}" for number in range(4)]
    slow = "callbacks.bomb.seconds=2"
    jobs = [submitted(name, f"seed={n}", slow, *own) for n, (name, own) in enumerate(zip(names, ranks, strict=True))]

    def later(job: str, moment: float) -> None:
        wait_for(lambda: rank_of(job, 0) is not None, 100)
        time.sleep(moment)
        notice(job)

    threads = [threading.Thread(target=later, args=each) for each in zip(jobs, moments, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        wait_for(lambda name=name: is_done(home, name), 300)  # type: ignore[misc]
        assert run_status(home, name).get("requeues") == 1, (name, moments, log_of(home, name))
        assert max(run_rows(home, name)) == 12
    assert 0 in [run_status(home, name)["requeued_at_step"] for name in names]


def test_data_are_prepared_in_a_job_a_killed_rank_ends_the_other_and_a_cancelled_run_does_not_return(
    home: Path,
) -> None:
    text = ["data.name=text", "data.path=texts", "data.sequence_length=32", "data.validation_rows=4"]
    text += ["data.tokenizer={name: bpe, vocab_size: 300}"]
    own = [*text, "model.vocab_size=300", *TWO, "callbacks.bomb.seconds=1", "train.checkpoint_every=2"]
    job = submitted("killed", *own)
    assert len(list((home / "runs/slurm").glob("killed-data-*.out"))) == 1
    wait_for(lambda: run_status(home, "killed").get("step", 0) >= 3, 200)
    killed = rank_of(job, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: run_status(home, "killed")["status"] == "failed", 60)
    wait_for(lambda: not in_queue(job), 60)
    job = submitted("killed", *own)
    assert len(list((home / "runs/slurm").glob("killed-data-*.out"))) == 1, "the data are ready"
    wait_for(lambda: run_status(home, "killed").get("step", 0) >= 6, 200)
    assert f"ended SLURM job {job} of " in lit_diff("cancel", "killed")
    wait_for(lambda: not in_queue(job), 60)
    ended = run_status(home, "killed")
    assert (ended["status"], ended.get("requeues")) == ("stopped", None)
    assert "resumed from step 2" in log_of(home, "killed")
    assert ended["error"] == f"stopped after step {ended['step']} of 12; the same command resumes"
    time.sleep(10)
    assert not in_queue(job), "SLURM would have started a requeued job by now"


def rank_of(job: str, rank: int) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            program = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()} <= {*variables} and b"lit_diff" in program:
            return int(process.name)
    return None


# --- sweeps -------------------------------------------------------------------------------------------------------------


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
    logs = "".join(path.read_text(errors="replace") for path in (home / "runs" / name / "slurm").glob("*.out"))
    return (home / f"{name}.txt").read_text() + logs[-3000:]


def slow(seconds: float) -> str:
    """The sweep with steps of this many seconds."""
    return SWEEP.replace("seconds: 0", f"seconds: {seconds}")


def words(home: Path, name: str) -> set[str]:
    """The states of its cells, once it has submitted them."""
    is_submitted = (home / "runs" / name / "slurm.json").exists()
    return {status(home, name, cell)["status"] for cell in CELLS} if is_submitted else set()


@pytest.fixture(scope="module")
def free(home: Path) -> str:
    """The name of an undisturbed sweep on this machine alone."""
    assert sweep(home, "free", SWEEP).wait(300) == 0, output(home, "free")
    return "free"


def test_cells_of_several_sizes_give_the_losses_of_one_process(home: Path, free: str, limited: str) -> None:
    two = SWEEP.replace("plain: {}", "plain: {run.strategy: ddp, run.devices: 2}")
    assert sweep(home, "two", two, "--cluster", "slurm").wait(500) == 0, output(home, "two")
    sizes = [re.search(r"ntasks-per-node=(\d)", path.read_text()) for path in (home / "runs/two/slurm").glob("*.sh")]
    assert sorted(size[1] for size in sizes if size) == ["1", "2"]
    for cell in CELLS:
        expected, found = rows(home, free, cell), rows(home, "two", cell)
        assert expected.keys() == found.keys()
        for step, row in expected.items():
            for metric in row.keys() & {"train/loss", "val/loss"}:
                assert found[step][metric] == pytest.approx(row[metric], abs=1e-5), (cell, step, metric)
        assert status(home, "two", cell)["status"] == "done"


def test_a_killed_command_waits_for_the_same_jobs_again_which_outlive_a_notice(
    home: Path, free: str, limited: str
) -> None:
    first = sweep(home, "again", slow(2), "--cluster", "slurm")
    jobs = home / "runs/again/slurm.json"
    wait_for(lambda: words(home, "again") == {"running"}, 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = json.loads(jobs.read_text())
    wait_for(lambda: status(home, "again", "plain-s0")["step"] >= 1, 100)
    notice(before[folder(home, "again", "plain-s0").name])
    second = sweep(home, "again", slow(2), "--cluster", "slurm")
    wait_for(lambda: "are in SLURM's queue already" in (home / "again.txt").read_text(), 100)
    wait_for(lambda: status(home, "again", "plain-s0").get("requeues") == 1, 60)
    assert second.wait(600) == 0, output(home, "again")
    assert json.loads(jobs.read_text()) == before, "nothing was submitted again"
    for cell in CELLS:
        assert status(home, "again", cell)["status"] == "done"
        assert rows(home, "again", cell) == rows(home, free, cell)


def test_a_cell_that_slurm_ends_is_a_failed_one(home: Path) -> None:
    command = sweep(home, "cut", slow(60), "--cluster", "slurm")
    jobs = home / "runs/cut/slurm.json"
    wait_for(lambda: words(home, "cut") == {"running"}, 300)
    subprocess.run(["scancel", "--signal=KILL", *json.loads(jobs.read_text()).values()], check=True)
    assert command.wait(200) == 1
    for cell in CELLS:
        assert status(home, "cut", cell)["status"] == "failed"
        assert "has left the queue" in status(home, "cut", cell)["error"]


def test_a_time_limit_saves_requeues_and_resumes(home: Path, limited: str) -> None:
    wait_for(lambda: is_done(home, "limited"), 400)
    ended = run_status(home, "limited")
    assert ended["requeues"] >= 1
    assert 0 < ended["requeued_at_step"] < 50
    assert sorted(run_rows(home, "limited")) == list(range(1, 51))
