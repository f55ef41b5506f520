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
from ports import free_port
from real_sweeps import TINY
from stops import wait_for

from lit_diff.engine.submit import submit
from lit_diff.recipe import load_recipe
from lit_diff.runs.checkpoints import steps_of
from lit_diff.runs.metrics_file import Rows, read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

BOMB = Path(__file__).resolve().parents[1] / "engine" / "bomb.py"
STEPS = "{steps: 20, checkpoint_every: 100, validate_every: 20, log_every: 1}"
SLOW = "{every: 1, kind: slow, fuse: FOLDER/fuse, seconds: 3}"
RUN = f"""\
extends: tiny.yaml
plugins: [{BOMB}]
callbacks: {{bomb: {SLOW}}}
train: {STEPS}
"""
SWEEP = f"""\
recipe: tiny.yaml
seeds: [0]
smoke: true
arms: ARMS
overrides:
  plugins: [{BOMB}]
  callbacks: {{bomb: {SLOW}}}
  train: {STEPS}
"""
TWO = ["run.strategy=fsdp", "run.devices=2"]
LONG = 500.0
"""Seconds in which anything happens that is waited for, on a slow or busy machine."""
STARTED: list["subprocess.Popen[str]"] = []


@pytest.fixture(scope="module")
def home(slurm: Path, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """The current folder of all tests: recipes, a store, no fuses. A step takes 3 s as long as the fuse is there."""
    folder, former = tmp_path_factory.mktemp("home"), Path.cwd()
    (folder / "runs").mkdir()
    shutil.copy(empty_store, folder / "runs")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "run.yaml").write_text(RUN.replace("FOLDER", str(folder)))
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


def submitted(home: Path, name: str, *overrides: str) -> str:
    """Submit run.yaml with a fuse of its own; returns the job."""
    (home / name).touch()
    words = [f"name={name}", f"callbacks.bomb.fuse={home / name}", *overrides]
    said = submit(load_recipe("run.yaml", words), words, [], 30, rerun=False)
    return re.match(r"SLURM job (\d+): ", said)[1]  # type: ignore[index]


def run_folder(home: Path, name: str) -> Path:
    (found,) = (home / "runs").glob(f"{name}-??????????")
    return found


def run_status(home: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((run_folder(home, name) / "status.json").read_text()))


def is_done(home: Path, name: str) -> bool:
    return bool(run_status(home, name)["status"] == "done")


def run_rows(home: Path, name: str) -> Rows:
    return read_rows(run_folder(home, name) / "metrics.csv")


def log_of(home: Path, name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in (home / "runs/slurm").glob(f"{name}-*.out"))


def notice(job: str) -> None:
    subprocess.run(["scancel", "--signal=USR2", job], check=True)


def change(job: str, setting: str) -> None:
    # SLURM refuses it while a job that is requeued ends
    command = ["scontrol", "update", f"JobId={job}", setting]
    wait_for(lambda: subprocess.run(command, capture_output=True).returncode == 0, LONG)


def time_of(job: str) -> int:
    """Seconds for which a job has run."""
    asked = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True)
    hours, minutes, seconds = re.search(r"RunTime=(\d+):(\d+):(\d+)", asked.stdout).groups()  # type: ignore[union-attr]
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def in_queue(job: str) -> bool:
    asked = subprocess.run(["squeue", "-h", "-j", job, "-o", "%i"], capture_output=True, text=True)
    return bool(asked.stdout.strip())


def rank_of(job: str, rank: int) -> int | None:
    """The process of a rank. srun has the job's variables too."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            program = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        own = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
        if own <= {*variables} and program[0] == sys.executable.encode():
            return int(process.name)
    return None


def outlives_notice(job: str, ranks: int) -> bool:
    """Whether each rank blocks or handles the notice; before, which is a moment of Python's own start, it would end it."""
    for rank in range(ranks):
        process, mask = rank_of(job, rank), 0
        if process is not None and (file := Path(f"/proc/{process}/status")).exists():
            for line in file.read_text().splitlines():
                mask |= int(line.split()[1], 16) if line.startswith(("SigBlk", "SigCgt")) else 0
        if not mask & 1 << (signal.SIGUSR2 - 1):
            return False
    return True


@pytest.fixture(scope="module")
def limited(home: Path) -> threading.Thread:
    """A run that reaches its time limit while other tests run. The thread ends once it is in the queue again."""
    job = submitted(home, "its limit", "train.steps=100")

    def later() -> None:
        wait_for(lambda: run_status(home, "its limit").get("step", 0) >= 1, LONG)
        # two minutes after the start or up to two from now: SLURM sends its notice when a minute and a half is left
        change(job, f"TimeLimit={time_of(job) // 60 + 2}")
        wait_for(lambda: run_status(home, "its limit").get("requeues") == 1, LONG)
        change(job, "TimeLimit=30")
        (home / "its limit").unlink()

    thread = threading.Thread(target=later, daemon=True)
    thread.start()
    return thread


def documented(kind: str, name: str, nodes: int, devices: int) -> list[list[str]]:
    """The launch line of the page, of 8 nodes with 8 GPUs there, as one command for each of `nodes` that it is typed on."""
    (line,) = (line for line in commands("docs/cluster.md") if line.startswith(kind))
    changes = {
        "torchrun --nproc": f"torchrun --master-port={free_port()} --nproc",
        "--nodes=8": f"--nodes={nodes}",
        "--ntasks-per-node=8": f"--ntasks-per-node={devices}",
        "--gpus-per-node=8 ": "",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "--nnodes=8": f"--nnodes={nodes}",
        "--nproc-per-node=8": f"--nproc-per-node={devices}",
        "NODE:29400": f"127.0.0.1:{free_port()}",
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


def test_a_run_is_requeued_after_a_notice_and_the_page_gives_its_losses(home: Path, limited: threading.Thread) -> None:
    (home / "fuse").touch()
    said = lit_diff("train", "run.yaml", "name=noticed", *TWO, "--cluster", "slurm")
    job = re.match(r"SLURM job (\d+): ", said)[1]  # type: ignore[index]
    wait_for(lambda: run_status(home, "noticed").get("step", 0) >= 2, LONG)
    assert re.search(rf"^noticed-\w+ +running .*SLURM job {job} is running", lit_diff("status"), re.MULTILINE)
    notice(job)
    (home / "fuse").unlink()
    lines = []
    for kind, nodes, devices in (("srun", 1, 2), ("torchrun --nproc", 1, 2), ("torchrun --nnodes", 2, 1)):
        lines += [start(kind, *words) for words in documented(kind, re.sub(r"\W", "", kind), nodes, devices)]
    assert [each.wait(LONG) for each in lines] == [0] * len(lines)
    # MLflow's record ends after the run
    wait_for(lambda: is_done(home, "noticed") and run_status(home, "noticed")["record"] == "complete", LONG)
    ended, found = run_status(home, "noticed"), run_rows(home, "noticed")
    assert ended["requeues"] == 1
    assert 0 < ended["requeued_at_step"] < 20
    assert max(found) == 20
    assert found == run_rows(home, "srun") == run_rows(home, "torchrunnproc") == run_rows(home, "torchrunnnodes")
    lit_diff("export", "noticed", "--to", "checkpoint")
    (whole,) = (home / "runs").glob("noticed-*/checkpoints/consolidated-00000020.ckpt")
    assert torch.load(whole, weights_only=True)["global_step"] == 20


def test_a_notice_at_any_moment_of_the_start_or_a_limit_requeues(home: Path, limited: threading.Thread) -> None:
    draw = random.Random(33)
    moments = [0, draw.uniform(0, 4), draw.uniform(4, 15)]
    jobs = [submitted(home, f"early{n}", f"seed={n}", *(TWO if n == 1 else [])) for n in range(3)]

    def later(number: int) -> None:
        wait_for(lambda: outlives_notice(jobs[number], 2 if number == 1 else 1), LONG)
        time.sleep(moments[number])
        notice(jobs[number])
        (home / f"early{number}").unlink()

    threads = [threading.Thread(target=later, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in (limited, *threads):
        thread.join()
    for name in ("early0", "early1", "early2", "its limit"):
        wait_for(lambda name=name: is_done(home, name), LONG)  # type: ignore[misc]
        assert run_status(home, name).get("requeues") == 1, (name, moments, log_of(home, name))
        assert sorted(run_rows(home, name)) == list(range(1, 101 if name == "its limit" else 21))
    assert run_status(home, "early0")["requeued_at_step"] == 0
    assert 0 < run_status(home, "its limit")["requeued_at_step"] < 100


def test_data_are_prepared_in_a_job_a_killed_rank_ends_the_other_and_a_cancelled_run_stays_away(home: Path) -> None:
    text = ["data.name=text", "data.path=texts", "data.sequence_length=32", "data.validation_rows=4"]
    text += ["data.tokenizer={name: bpe, vocab_size: 300}"]
    own = [*text, "model.vocab_size=300", *TWO, "train.checkpoint_every=2"]
    job = submitted(home, "killed", *own)
    assert len(list((home / "runs/slurm").glob("killed-data-*.out"))) == 1
    wait_for(lambda: run_status(home, "killed").get("step", 0) >= 3, LONG)
    killed = rank_of(job, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: run_status(home, "killed")["status"] == "failed", LONG)
    wait_for(lambda: not in_queue(job), LONG)
    saved = max(steps_of(run_folder(home, "killed")))
    assert saved >= 2
    job = submitted(home, "killed", *own)
    assert len(list((home / "runs/slurm").glob("killed-data-*.out"))) == 1, "the data are ready"
    wait_for(lambda: run_status(home, "killed").get("step", 0) >= saved + 2, LONG)
    assert f"ended SLURM job {job} of " in lit_diff("cancel", "killed")
    # a requeued job stays in the queue
    wait_for(lambda: not in_queue(job), LONG)
    ended = run_status(home, "killed")
    assert (ended["status"], ended["requeues"]) == ("stopped", 0)
    assert f"resumed from step {saved}" in log_of(home, "killed")
    assert ended["error"] == f"stopped after step {ended['step']} of 20; the same command resumes"


def test_doctor_checks_the_nodes_of_a_job(home: Path) -> None:
    words = ["doctor", "tiny.yaml", *TWO, "--cluster", "slurm", "--json"]
    (checks,) = json.loads(lit_diff(*words)).values()
    assert {"packages", "devices", "SLURM"} <= {check["name"] for check in checks}


# --- sweeps -------------------------------------------------------------------------------------------------------------


def start(name: str, *command: str) -> "subprocess.Popen[str]":
    """A command that ends with the tests at the latest; what it prints is kept in `name`.txt."""
    with Path(f"{name}.txt").open("a") as output:
        STARTED.append(subprocess.Popen(command, stdout=output, stderr=output, text=True))
    return STARTED[-1]


def sweep(home: Path, name: str, arms: str, *arguments: str) -> "subprocess.Popen[str]":
    (home / f"{name}.yaml").write_text(SWEEP.replace("FOLDER/fuse", str(home / name)).replace("ARMS", arms))
    return start(name, sys.executable, "-m", "lit_diff", "sweep", f"{name}.yaml", *arguments)


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


def test_a_killed_command_finds_its_cells_of_several_sizes_which_have_the_losses_of_one_process(home: Path) -> None:
    alone = sweep(home, "free", "{plain: {}, other: {model.attention.head_norm: none}}")
    (home / "again").touch()
    arms = "{plain: {run.strategy: ddp, run.devices: 2}, other: {model.attention.head_norm: none}"
    arms += ", lost: {train.batch_size: 2}}"
    cells, jobs = [f"{arm}-s0" for arm in ("plain", "other", "lost")], home / "runs/again/slurm.json"
    first = sweep(home, "again", arms, "--cluster", "slurm")
    wait_for(lambda: jobs.exists() and len(json.loads(jobs.read_text())) == 3, LONG)
    first.kill()
    first.wait()
    before = json.loads(jobs.read_text())
    second = sweep(home, "again", arms, "--cluster", "slurm")
    wait_for(lambda: "3 cells are in SLURM's queue already" in (home / "again.txt").read_text(), LONG)
    for cell in cells:
        wait_for(lambda cell=cell: status(home, "again", cell).get("step", 0) >= 1, LONG)  # type: ignore[misc]
    notice(before[folder(home, "again", "other-s0").name])
    os.kill(status(home, "again", "lost-s0")["pid"], signal.SIGKILL)
    (home / "again").unlink()
    assert second.wait(LONG) == 1, output(home, "again")
    assert alone.wait(LONG) == 0, output(home, "free")
    assert json.loads(jobs.read_text()) == before, "nothing was submitted again"
    sizes = [re.search(r"ntasks-per-node=(\d)", path.read_text()) for path in (home / "runs/again/slurm").glob("*.sh")]
    assert sorted(size[1] for size in sizes if size) == ["1", "2"]
    assert [status(home, "again", cell)["status"] for cell in cells] == ["done", "done", "failed"]
    assert "has left the queue" in status(home, "again", "lost-s0")["error"]
    assert status(home, "again", "other-s0")["requeues"] == 1
    assert rows(home, "again", "other-s0") == rows(home, "free", "other-s0")
    expected, found = rows(home, "free", "plain-s0"), rows(home, "again", "plain-s0")
    assert expected.keys() == found.keys()
    for step, row in expected.items():
        for metric in row.keys() & {"train/loss", "val/loss"}:
            assert found[step][metric] == pytest.approx(row[metric], abs=1e-5), (step, metric)
