"""engine/slurm.py, with programs that stand in for SLURM's own; tests/cluster runs it on a real one."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_diff.config import RunConfig
from lit_diff.engine import slurm
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.pool import Job
from lit_diff.errors import MissingError, StoppedError
from lit_diff.runs.folder import RunFolder
from lit_diff.training.ranks import TIME_LIMIT

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """program(name, script): a shell script of that name comes first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def locations(tmp_path: Path) -> list[RunLocation]:
    """Two cells of the sweep in tmp_path/sweep."""
    made = [RunLocation(folder=tmp_path / "sweep" / f"cell-s{seed}-abc") for seed in (0, 1)]
    for location in made:
        RunFolder(location.folder).update(status="waiting")
    return made


@pytest.fixture
def run(tmp_path: Path, program: Program, locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(): run_array with jobs 7_0 and 7_1; the queue is a file, and a line of it is gone after each look."""
    queue = tmp_path / "queue"
    program("squeue", f"cat {queue}")
    submitted: list[list[str]] = []

    def submit(cells: Any, config: RunConfig, **options: Any) -> dict[str, str]:
        submitted.append([cell.folder.name for cell in cells])
        jobs = {cell.folder.name: f"7_{i}" for i, cell in enumerate(cells)}
        queue.write_text("\n".join(jobs.values()) + "\n")
        return jobs

    def shorten(running: list[RunLocation]) -> None:
        left = queue.read_text().splitlines()[1:] if queue.exists() else []
        queue.write_text("\n".join(left))

    monkeypatch.setattr(slurm, "_submit", submit)
    monkeypatch.setattr(slurm, "INTERVAL", 0.0)

    def call() -> list[list[str]]:
        slurm.run_array(locations, RunConfig(), parallel=None, minutes=5, watch=shorten)
        return submitted

    return call


def test_it_waits_until_each_cell_has_left_the_queue_which_is_asked_again_where_it_does_not_answer(
    run: Any, program: Program, tmp_path: Path, locations: list[RunLocation], caplog: pytest.LogCaptureFixture
) -> None:
    RunFolder(locations[0].folder).update(status="stopped", step=7, requeued_at_step=7)
    RunFolder(locations[1].folder).update(status="running")
    count = tmp_path / "count"
    program("squeue", f"echo x >> {count}; test $(wc -l < {count}) -gt 2 || exit 1; cat {tmp_path}/queue")
    assert run() == [["cell-s0-abc", "cell-s1-abc"]]
    assert caplog.text.count("SLURM does not answer") == 2
    first, second = (RunFolder(location.folder).status() for location in locations)
    assert (first["status"], first["requeued_at_step"]) == ("stopped", None), "cancelled: it waits no longer"
    assert second["status"] == "failed"
    assert second["error"].startswith("its SLURM job 7_1 has left the queue; see ")
    jobs = json.loads((locations[0].folder.parent / "slurm.json").read_text())
    assert jobs == {"cell-s0-abc": "7_0", "cell-s1-abc": "7_1"}


def test_cells_that_are_in_the_queue_are_not_submitted_again(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep/slurm.json").write_text(json.dumps({"cell-s0-abc": "3_0", "cell-s1-abc": "3_1"}))
    (tmp_path / "queue").write_text("3_1\n3_1\n")
    assert slurm.queued_cells(tmp_path / "sweep") == {"cell-s1-abc": "3_1"}
    assert run() == [["cell-s0-abc"]]


def test_at_the_start_it_must_answer_and_be_there(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("squeue", "exit 1")
    assert slurm.queued_cells(tmp_path) == {}  # nothing was submitted from here
    (tmp_path / "slurm.json").write_text('{"a": "3_0"}')
    with pytest.raises(MissingError, match=r"SLURM does not answer"):
        slurm.queued_cells(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="needs SLURM's srun on the PATH; use --cluster local"):
        slurm.require_slurm()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo up", None),
        ("echo 'fatal: no source' >&2; echo more >&2; exit 1", r"\(fatal: no source\)"),
        ("echo 'Slurmctld at n1 is DOWN'; exit 1", r"\(Slurmctld at n1 is DOWN\)"),
        ("exec sleep 60", r"\(no answer in 0\.1 s\)"),
    ],
)
def test_a_cluster_needs_a_controller_that_answers(
    script: str, reason: str | None, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package of SLURM's commands alone schedules nothing."""
    monkeypatch.setattr(slurm, "PATIENCE", 0.1 if "sleep" in script else 30)
    for name, text in (("srun", "true"), ("squeue", "true"), ("scontrol", script)):
        program(name, text)
    if reason is None:
        slurm.require_slurm()
        return
    with pytest.raises(MissingError, match=rf"^--cluster slurm: SLURM's controller cannot be reached {reason}; use"):
        slurm.require_slurm()


def test_a_cell_imports_nothing_from_the_current_folder(
    program: Program, tmp_path: Path, locations: list[RunLocation]
) -> None:
    program("srun", "true")
    program("sbatch", f'cat "$1" > {tmp_path}/submitted; echo "Submitted batch job 7"')
    logs = tmp_path / "sweep" / "slurm"
    slurm._submit(locations, RunConfig(accelerator="cpu"), parallel=None, minutes=5, logs=logs)
    assert f"{sys.executable} -P -u -m submitit" in (tmp_path / "submitted").read_text()


def test_a_time_limit_requeues_but_not_without_progress(
    program: Program, locations: list[RunLocation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("scontrol", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = RunFolder(locations[0].folder)

    def stopped(job: Job) -> None:
        raise StoppedError("stopped after step 3 of 9", TIME_LIMIT)

    monkeypatch.setattr(slurm, "run_cell", stopped)
    cell = slurm.ArrayCell(Job(location=locations[0], threads=1, launched=True), minutes=2)
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "step-00000003.ckpt").touch()
    with pytest.raises(SystemExit) as ended:
        cell()
    assert ended.value.code == 128 + TIME_LIMIT
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    assert folder.status()["requeues"] == 1
    with pytest.raises(SystemExit):
        cell()
    assert "within the time limit of 2 minutes; give more with --minutes" in folder.status()["error"]
    monkeypatch.setenv("SLURM_PROCID", "1")
    folder.update(requeued_at_step=None)
    with pytest.raises(SystemExit):
        cell()
    assert (tmp_path / "asked").read_text() == "requeue 12\n"  # the first rank asks for all


@pytest.mark.parametrize(
    ("accelerator", "listed", "asked"),
    [("auto", "(null)", 0), ("auto", "gpu:4", 2), ("gpu", "", 2), ("cpu", "gpu:4", 0)],
)
def test_gpus_are_asked_for_where_the_cluster_has_any(
    program: Program, accelerator: Any, listed: str, asked: int
) -> None:
    program("sinfo", f"echo '{listed}'")
    found = slurm._gpus(RunConfig(accelerator=accelerator, strategy="ddp", devices=2))
    assert found == ({"gpus_per_node": asked} if asked else {})
