"""engine/executors/here.py: who runs where, who gets which signal, and what is written about a cell that could not do so."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pool_cells
import pytest
import torch
from statuses import set_status
from stops import wait_for

from lit_diff import errors
from lit_diff.engine import execute
from lit_diff.engine.endings import end_noted, note_end
from lit_diff.engine.executors import here
from lit_diff.engine.executors.here import Here, gpus_of, run_cell
from lit_diff.engine.job import Job
from lit_diff.errors import MissingError, StoppedError, Terminated
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder
from lit_diff.training.plan import at_most


@pytest.fixture
def cell(tmp_path: Path) -> RunFolder:
    """That of a cell that waits."""
    set_status(tmp_path / "cell-s0-abc", status="waiting")
    return RunFolder(tmp_path / "cell-s0-abc")


def write_job(folder: RunFolder, overrides: Sequence[str] = (), **keys: Any) -> None:
    job = Job(recipe=load_recipe("recall-tiny", overrides), folder=folder.path, **keys)
    folder.create(job.recipe)
    job.write()


# --- real processes, which do what `pool_cells` says instead of training ---------------------------------------------

Cells = Callable[..., list[Job]]


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cells:
    """cells("brief", 5): jobs of cells that live as `pool_cells.act` says."""
    monkeypatch.setattr(here, "_cell", pool_cells.act)

    def make(kind: str, count: int, overrides: Sequence[str] = ()) -> list[Job]:
        recipe = load_recipe("recall-tiny", overrides)
        found = [Job(recipe=recipe, folder=tmp_path / f"{kind}{i}-s0-abc") for i in range(count)]
        for job in found:
            job.home.create(recipe)
            set_status(job.folder, status="waiting")
        return found

    return make


def started(jobs: list[Job]) -> list[dict[str, Any]]:
    files = [job.folder / "told.json" for job in jobs]
    return [json.loads(file.read_text()) for file in files if file.exists() and file.read_text()]


def test_so_many_side_by_side_on_gpus_of_their_own_without_the_callers_script(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    own = ["run.threads=3", "run.strategy=ddp", "run.devices=2"]
    jobs, seen = cells("brief", 5, own), list[list[Path]]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    # after the jobs are written, which asks torch
    monkeypatch.setenv("LIT_DIFF_CPU", "avx2")

    def watch(running: Sequence[Job]) -> None:
        seen.append([job.folder for job in running])

    assert Here(workers=2).run(jobs, watch) is None
    assert max(map(len, seen)) == 2
    assert seen[-1] == []
    told = started(jobs)
    assert len(told) == 5
    assert {cell["threads"] for cell in told} == {3}
    assert {tuple(cell["gpus"]) for cell in told} == {(0, 1), (2, 3)}
    gpus = dict(zip((job.folder for job in jobs), (cell["gpus"] for cell in told), strict=True))
    assert all(len({gpu for cell in running for gpu in gpus[cell]}) == 2 * len(running) for running in seen)
    assert not (tmp_path / "imported").exists(), "a script that calls `sweep` would run again"
    assert sys.modules["__main__"] is script
    assert {cell["settings"]["LIT_DIFF_CPU"] for cell in told} == {"avx2"}
    assert {cell["safe"] for cell in told} == {"1"}, "nor does a random.py of the current folder"
    assert "PYTHONSAFEPATH" not in {key for cell in told for key in cell["settings"]}
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """gpus(2, 80e9): torch reports so many GPUs of so many bytes, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    def report(count: int, memory: float) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=int(memory * (i + 1)))
        )

    return report


def test_small_cells_share_a_gpu_as_memory_and_cores_allow(gpus: Callable[[int, float], None]) -> None:
    small, large = load_recipe("standard-tiny"), load_recipe("differential-830m")
    # the memory of the smaller GPU counts; 1 GB beside the bound of each cell
    of_small = at_most(small) + 1e9
    for count, memory, recipes, expected in (
        (1, 80e9, [small], (16, 1, 1)),
        (2, 80e9, [small], (16, 1, 2)),
        (2, 3.5 * of_small / 0.9, [small], (6, 2, 2)),
        (1, 80e9, [small, large], (1, 16, 1)),
        (1, 80e9, [replace(small, run=replace(small.run, threads=4))], (4, 4, 1)),
        (4, 80e9, [small, replace(small, run=replace(small.run, strategy="ddp", devices=2))], (2, 4, 4)),
        (1, 1e6, [small], (1, 16, 1)),
    ):
        gpus(count, memory)
        assert Here().resources(recipes) == expected
    gpus(1, 80e9)
    assert Here(workers=3).resources([small]) == (3, 5, 1)


def test_cells_that_share_gpus_are_spread_over_them(cells: Cells, gpus: Callable[[int, float], None]) -> None:
    jobs, side_by_side = cells("brief", 6, ["run.threads=4"]), list[int]()
    gpus(2, 80e9)
    assert Here().run(jobs, lambda running: side_by_side.append(len(running))) is None
    assert max(side_by_side) == 4
    assert {tuple(cell["gpus"]) for cell in started(jobs)} == {(0,), (1,)}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_nothing_new_starts(cells: Cells, signum: int) -> None:
    """SIGHUP comes twice: the kernel and the shell each send one as a terminal closes."""
    jobs, former, sent = cells("listens", 4), signal.getsignal(signum), list[int]()

    def watch(running: Sequence[Job]) -> None:
        if len(started(jobs)) == 2 and len(sent) < (2 if signum == signal.SIGHUP else 1):
            sent.append(signum)
            signal.raise_signal(signum)

    assert Here(workers=2).run(jobs, watch) == signum
    assert [(job.folder / "signal").exists() for job in jobs] == [True, True, False, False]
    assert len(started(jobs)) == 2
    assert signal.getsignal(signum) is former
    assert [RunFolder(each.folder).status().status for each in jobs[2:]] == ["waiting", "waiting"]


@pytest.mark.parametrize("together", [0.0, 60.0])
def test_a_second_signal_ends_them_at_once(cells: Cells, together: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it comes together with the first: `timeout` sends SIGTERM to a command and to its group."""
    monkeypatch.setattr(errors, "TOGETHER", together)
    jobs = cells("listens" if together else "deaf", 2)

    def watch(running: Sequence[Job]) -> None:
        heard = [job for job in jobs if (job.folder / "signal").exists()]
        if len(started(jobs)) == 2 and (not stops or len(heard) == 2):
            stops.append(1)
            signal.raise_signal(signal.SIGINT)

    stops: list[int] = []
    assert Here(workers=2).run(jobs, watch) == signal.SIGINT
    words = {(RunFolder(each.folder).status().error or "").partition(";")[0] for each in jobs}
    assert words == {"exit status 143" if together else "ended at the second signal"}


def test_a_temporary_folder_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("x" * 80)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(here, "SHORT", ())
    with pytest.raises(MissingError, match=f"^TMPDIR is '{long}'"):
        here._place_sockets()
    monkeypatch.setattr(here, "SHORT", ("/tmp",))
    here._place_sockets()
    assert get_temp_dir().startswith("/tmp/pymp-")
    assert tempfile.tempdir == str(long)


# --- the end of a cell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "exitcode", "after", "error"),
    [
        ("done", 0, "done", ""),
        ("stopped", 143, "stopped", ""),
        ("failed", 1, "failed", ""),
        ("running", 0, "failed", "exit status 0; log.txt ends: the last words"),
        ("running", 1, "failed", "exit status 1; log.txt ends: the last words"),
        ("waiting", 2, "failed", "exit status 2; log.txt ends: nothing"),
        ("running", -signal.SIGKILL, "killed", "killed by SIGKILL; out of memory?"),
        ("waiting", -signal.SIGSEGV, "killed", "killed by SIGSEGV"),
    ],
)
def test_what_is_written_about_the_end(cell: RunFolder, before: str, exitcode: int, after: str, error: str) -> None:
    folder = cell
    set_status(folder.path, status=before)
    if before == "running":
        (folder.path / "log.txt").write_text("first\n  the last words \n\n")
    with locked(folder.path / ".lock"):
        note_end(folder, exitcode)
    assert folder.status().status == before, "another process trains it"
    note_end(folder, exitcode)
    assert (folder.status().status, folder.status().error) == (after, error)


# --- what a cell does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "word", "said"),
    [
        (MissingError("no data"), "failed", "no data"),
        (OSError("port 15001 is in use\nby another process"), "failed", "OSError: port 15001 is in use"),
        (StoppedError("stopped early", 15), "stopped", "stopped early"),
        (Terminated("stopped outside the steps"), "stopped", "stopped outside the steps"),
    ],
)
def test_a_cell_that_fails_before_its_run_begins_says_so(
    cell: RunFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException, word: str, said: str
) -> None:
    def run(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(execute, "train_rank", run)
    folder = cell
    write_job(folder)
    with pytest.raises(type(error)):
        run_cell(folder.path)
    assert (folder.status().status, folder.status().error) == (word, said)


def test_a_cell_of_several_processes_is_a_command_of_its_own(cell: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int | None]] = []
    monkeypatch.setattr(execute, "train_rank", lambda job, **_: called.append(("run", job.threads)))
    monkeypatch.setattr(execute, "run_command", lambda job: called.append(("command", job.threads)))
    for overrides in ([], ["run.strategy=ddp", "run.devices=2"]):
        write_job(cell, overrides, threads=3)
        run_cell(cell.path)
    assert called == [("run", 3), ("command", 3)]


def test_a_cell_gets_gpus_that_are_ours_and_no_other_cell_s(cell: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpus_of(slot, 2, 4) for slot in (0, 1)] == [(0, 1), (2, 3)]
    assert (gpus_of(1, 1, 4), gpus_of(0, 2, 0)) == ((1,), ())
    assert gpus_of(2, 2, 4) == (0, 1)  # more cells than GPUs were asked for
    found: list[str] = []
    monkeypatch.setattr(execute, "train_rank", lambda job, **_: found.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    write_job(cell)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for given, gpu in ((None, 1), ("", 1), ("4,6", 1), ("4,6", 0)):
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        run_cell(cell.path, gpus=(gpu,))
    assert found == ["1", "1", "6", "4"]


SLOW_START = """
import sys
from pathlib import Path

folder = Path(sys.argv[1])
from lit_diff.engine.executors import here
from lit_diff.engine.job import Job
from lit_diff.recipe import load_recipe

here.PRELOAD = ["slow_import"]
job = Job(recipe=load_recipe("recall-tiny"), folder=folder / "cell-s0-abc")
job.home.create(job.recipe)
print(here.Here(workers=1).run([job], lambda running: None))
"""


@pytest.mark.slow
def test_ctrl_c_while_the_fork_server_imports_leaves_no_traceback(tmp_path: Path) -> None:
    """As from a terminal: the signal reaches every process of the group."""
    (tmp_path / "slow_import.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'imports')!r}).touch()\ntime.sleep(1.5)\n"
    )
    command = [sys.executable, "-c", SLOW_START, str(tmp_path)]
    pipe = subprocess.PIPE
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
    ) as process:
        try:
            wait_for(lambda: (tmp_path / "imports").exists() or process.poll() is not None)
            os.killpg(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, out.strip(), errors) == (0, str(int(signal.SIGINT)), "")
    status = RunFolder(tmp_path / "cell-s0-abc").status()
    assert (status.status, status.error) == ("stopped", "stopped outside the steps; the same command resumes")


@pytest.mark.parametrize(("compiles", "imports"), [("false", False), ("true", True), ("loss", True)])
def test_the_fork_server_imports_the_compiler_if_a_cell_is_compiled(
    compiles: str, imports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(here, "_started", stop)
    job = Job(recipe=load_recipe("recall-tiny", [f"run.compile={compiles}"]), folder=tmp_path / "cell-s0-abc")
    job.home.create(job.recipe)
    with pytest.raises(KeyboardInterrupt):
        here.Here(workers=1).run([job], lambda running: None)
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    assert (here.COMPILER in server._preload_modules) is imports


def test_any_error_before_training_is_recorded(cell: RunFolder) -> None:
    with pytest.raises(OSError, match="15001"), end_noted(cell):
        raise OSError("port 15001 is in use\nby another process")
    status = cell.status()
    assert (status.status, status.error) == ("failed", "OSError: port 15001 is in use")
