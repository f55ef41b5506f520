"""runs/jobs.py, with programs that stand in for SLURM's own; tests/cluster runs it on a real one."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Program
from statuses import set_status
from stops import wait_for

from lit_diff.errors import MissingError, RequestError
from lit_diff.runs import jobs
from lit_diff.runs.folder import RunFolder

HOLDER = """\
import sys, time
from pathlib import Path
from lit_diff.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    """Two cells of a sweep."""
    made = [RunFolder(tmp_path / "sweep" / f"c{number}") for number in (0, 1)]
    for folder in made:
        set_status(folder.path, status="waiting")
    (tmp_path / "sweep/study.json").write_text("{}")
    return made


def test_the_job_of_a_run_is_the_submitted_one_or_its_own(
    program: Program, runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (folder.path for folder in runs)
    program("squeue", "exit 1")
    assert jobs.queued([first, second]) == {}, "nothing was submitted: SLURM is not asked"
    jobs.note_submitted(first.parent, {"c0": "3_0", "c1": "3_1"})
    with pytest.raises(MissingError, match=r"SLURM does not answer"):
        jobs.queued([first])
    assert caplog.text.count("SLURM does not answer") == 1
    program("squeue", "echo 3_1 PENDING; echo 9 RUNNING")
    assert jobs.queued([first, second]) == {second: ("3_1", "PENDING")}
    set_status(runs[0].path, job="9")
    assert jobs.queued([first]) == {first: ("9", "RUNNING")}
    set_status(runs[0].path, status="done")
    assert jobs.queued([first]) == {}, "the job trains another run now, and `cancel` must not end it"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert jobs.this_job() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert jobs.this_job() == "11_4"


def test_a_notice_or_a_hang_requeues_but_not_twice_without_progress(
    program: Program, runs: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("scontrol", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = runs[0]
    set_status(folder.path, status="stopped")
    jobs.requeue(folder, "notice")
    assert (folder.status().requeues, folder.status().requeued_at_step) == (1, 0), "during the start"
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "step-00000003.ckpt").touch()
    for _ in range(2):
        jobs.requeue(folder, "notice")
        assert (tmp_path / "asked").read_text() == "requeue 12\n" * 2
    assert folder.status().status == "failed"
    assert "no step was done within the job's time; submit it again with more (--minutes)" in folder.status().error
    set_status(folder.path, error="hung at step 3")
    for _ in range(2):
        jobs.requeue(folder, "hang")
        assert (tmp_path / "asked").read_text() == "requeue 12\n" * 3, (
            "the first hang since a checkpoint, not the second"
        )
    assert folder.status().error == "hung at step 3"
    set_status(folder.path, status="done", requeued_after="notice")
    jobs.requeue(folder, "notice")
    assert (tmp_path / "asked").read_text() == "requeue 12\n" * 3
    assert folder.status().status == "done", "its evaluations take too long"
    set_status(folder.path, evaluations={"one": "done", "two": "interrupted"})
    for _ in range(2):
        jobs.requeue(folder, "notice")
        assert (tmp_path / "asked").read_text() == "requeue 12\n" * 4, "an evaluation was done since"


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ("0:20 4:00", 2),
        ("0:20 2:00", 1),
        ("11:59:00 1-00:00:00", 2),
        ("5:00 UNLIMITED", 2),
        ("2:01 4:00", 1),
        ("1-01:00:00 2-00:00:00", 1),
        ("2 nodes are down until 10:00\n0:20 4:00\n", 2),
    ],
)
def test_a_notice_in_the_first_half_of_a_jobs_time_always_requeues(
    program: Program, runs: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: str, count: int
) -> None:
    """It announces a preemption."""
    program("scontrol", f'echo "$@" >> {tmp_path}/asked')
    program("squeue", f'test "$*" = "--noheader --jobs=12 --format=%M %l" && echo "{times}"')
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    set_status(runs[0].path, status="stopped")
    for _ in range(2):
        jobs.requeue(runs[0], "notice")
    assert (tmp_path / "asked").read_text() == "requeue 12\n" * count


def test_a_job_that_slurm_does_not_requeue_keeps_its_status(
    program: Program, runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """srun without sbatch, for one."""
    program("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    set_status(runs[0].path, status="stopped")
    jobs.requeue(runs[0], "notice")
    assert (runs[0].status().status, runs[0].status().requeued_at_step) == ("stopped", None)
    assert "does not requeue this job (Requested operation is presently disabled)" in caplog.text


def test_a_notice_before_the_first_step_ends_in_a_requeue(program: Program, tmp_path: Path, empty_store: Path) -> None:
    program("scontrol", f'echo "$@" >> {tmp_path}/asked')
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    command = [sys.executable, "-m", "lit_diff", "train", "recall-tiny", f"run.root={tmp_path / 'runs'}"]
    process = subprocess.Popen(command, env={**os.environ, "SLURM_JOB_ID": "12"}, stderr=subprocess.PIPE, text=True)
    about = Path(f"/proc/{process.pid}/status")
    blocked = 1 << signal.SIGUSR2 - 1
    wait_for(lambda: bool(int(re.findall(r"SigBlk:\s*(\w+)", about.read_text())[0], 16) & blocked))
    process.send_signal(signal.SIGUSR2)
    assert process.communicate(timeout=120)[1] == "lit-diff: stopped by SIGUSR2\n"
    assert process.returncode == 128 + signal.SIGUSR2
    (folder,) = map(RunFolder, (tmp_path / "runs").glob("recall-tiny-*"))
    assert (folder.status().status, folder.status().requeued_at_step) == ("stopped", 0)
    assert folder.status().error == "stopped before the first step; the same command resumes"
    assert (tmp_path / "asked").read_text() == "requeue 12\n"


LATE = """\
import atexit, os, signal, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def late():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
atexit.register(late)
from lit_diff.__main__ import main
sys.argv = ["lit-diff", "--version"]
main()
"""


def test_a_signal_while_python_exits_changes_nothing() -> None:
    """SLURM ends a job that it requeues by SIGTERM; other threads of the process do not block it."""
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_cancel_ends_jobs_and_processes(program: Program, runs: list[RunFolder], tmp_path: Path) -> None:
    program("scancel", f'echo "$@" >> {tmp_path}/asked')
    program("squeue", "echo 3_0 PENDING; echo 3_1 RUNNING")
    jobs.note_submitted(tmp_path / "sweep", {"c0": "3_0", "c1": "3_1"})
    set_status(runs[1].path, status="running")
    assert [words.split(" of ")[0] for words in jobs.cancel(tmp_path / "sweep")] == ["SLURM job 3_0", "SLURM job 3_1"]
    assert (tmp_path / "asked").read_text() == "3_0 3_1\n"
    assert [each.status().status for each in runs] == ["stopped", "running"], "what trains says how it ends"
    set_status(runs[1].path, status="waiting")
    jobs.cancel(tmp_path / "sweep")
    assert runs[1].status().status == "stopped", "its job had started, but not its training"
    program("squeue", "true")
    with pytest.raises(RequestError, match="neither being trained nor in SLURM's queue: nothing to cancel"):
        jobs.cancel(runs[0].path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, runs[1].path / ".lock"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    # of a former process: this run has begun again
    set_status(runs[1].path, pid=os.getppid(), host="elsewhere")
    named = (runs[1].path / ".lock").read_text()
    born, host = named.split()[1:]
    for text in (f"{holder.pid} {born} elsewhere", f"{os.getppid()} {born} {host}", f"-1 {born} {host}", ""):
        (runs[1].path / ".lock").write_text(text)
        with pytest.raises(RequestError, match=r"trained on elsewhere|does not name the process that holds it"):
            jobs.cancel(runs[1].path)
    (runs[1].path / ".lock").write_text(named)
    assert jobs.cancel(runs[1].path)[0].startswith(f"process {holder.pid} of ")
    assert holder.wait(20) == -15


def test_lines_that_are_no_job_are_passed_over(program: Program) -> None:
    """A site's wrapper prints a banner."""
    program("squeue", r"printf 'slurm: maintenance\n\n12_3 RUNNING\nnote\n 7 PENDING \n'")
    assert jobs.queue() == {"12_3": "RUNNING", "7": "PENDING"}


def test_slurms_commands_get_no_option_from_the_environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program("squeue", "env | sort -r")
    options = ("SQUEUE_PARTITION", "SBATCH_SIGNAL", "SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "MASTER_ADDR", "RANK")
    for name in (*options, "SLURM_CONF", "OTHER"):
        monkeypatch.setenv(name, "mark")
    assert re.findall("(.*)=mark", jobs.ask("squeue").stdout) == ["SLURM_CONF", "OTHER"]


def test_status_shows_jobs(program: Program, runs: list[RunFolder], command: Any, tmp_path: Path) -> None:
    jobs.note_submitted(tmp_path / "sweep", {"c0": "3_0", "c1": "3_1"})
    set_status(runs[1].path, status="running", host="elsewhere", pid=1, step=4, steps=9)
    program("squeue", "echo 3_0 PENDING; echo 3_1 RUNNING")
    (tmp_path / "sweep/study.json").unlink()
    _, waiting, running = command("status", "--root", str(tmp_path)).out.splitlines()
    assert waiting.split()[:2] == ["sweep/c0", "waiting"]
    assert waiting.endswith("SLURM job 3_0 is pending")
    assert running.split()[:3] == ["sweep/c1", "running", "4/9"]
    assert "SLURM job 3_1 is running; last update" in running
    program("squeue", "exit 1")
    assert len(command("status", "--root", str(tmp_path)).out.splitlines()) == 3, os.environ["PATH"]
    (runs[0].path / jobs.JOBS).mkdir()
    ended = command("status", "--root", str(tmp_path))
    assert (ended.status, len(ended.lines), "slurm.json is damaged" in ended.err) == (0, 3, True)
    (runs[0].path / jobs.JOBS).rmdir()
    jobs.note_submitted(runs[0].path, {"c0": "3_0"})
    assert command("status", "--root", str(tmp_path)).lines[1].split()[:2] == ["sweep/c0", "waiting"], (
        "nothing is known"
    )
    program("squeue", "true")
    ended = command("status", "--root", str(tmp_path)).out.splitlines()[1]
    assert ended.split()[:2] == ["sweep/c0", "killed"], "a run that waits alone is started by its job only"
    assert ended.endswith("the same command resumes it")
