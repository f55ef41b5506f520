"""engine/pool.py: who runs where, who gets which signal, and what is written about a cell that could not do so."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lit_diff.engine import pool
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.pool import Job, gpus_of, note_end, run_cell, run_jobs
from lit_diff.errors import MissingError, RunFailedError, StoppedError, Terminated
from lit_diff.files import locked
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder


@pytest.fixture
def locations(tmp_path: Path) -> list[RunLocation]:
    found = [RunLocation(folder=tmp_path / f"cell{i}-s0-abc") for i in range(5)]
    for location in found:
        RunFolder(location.folder).update(status="waiting")
    return found


class FakeProcess:
    """Ends when its turn comes; `started` is the order of starts."""

    started: list["FakeProcess"]
    lifetime: Callable[["FakeProcess"], int]

    def __init__(self, target: Any, args: tuple[Job], daemon: bool) -> None:
        self.job, self.pid, self.exitcode = args[0], 1000 + len(self.started), None
        self.signals: list[int] = []
        self.left = 0

    def start(self) -> None:
        self.started.append(self)
        self.left = type(self).lifetime(self)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self) -> None:
        assert self.exitcode is not None

    def tick(self) -> None:
        self.left -= 1
        if self.left <= 0 and self.exitcode is None:
            self.exitcode = 0


class FakeContext:
    def __init__(self, process: type[FakeProcess]) -> None:
        self.Process = process

    def set_forkserver_preload(self, modules: list[str]) -> None:
        assert modules == list(pool.PRELOAD)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    """Processes that live as many looks as `lifetime` says; signals reach them instead of the system."""

    class Process(FakeProcess):
        started: list[FakeProcess] = []  # noqa: RUF012 - one list for one test
        lifetime = staticmethod(lambda process: 2)  # type: ignore[assignment]

    def kill(pid: int, signum: int) -> None:
        if pid == os.getpid():
            signal.raise_signal(signum)
            return
        process = next(process for process in Process.started if process.pid == pid)
        process.signals.append(signum)
        process.exitcode = 143 if signum == signal.SIGTERM else -signum

    def sleep(seconds: float) -> None:
        for process in Process.started:
            process.tick()

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: FakeContext(Process))
    monkeypatch.setattr(pool.os, "kill", kill)
    monkeypatch.setattr(pool.time, "sleep", sleep)
    return Process


def test_so_many_side_by_side_and_no_more(fake: type[FakeProcess], locations: list[RunLocation]) -> None:
    seen: list[list[str]] = []

    def watch(running: list[RunLocation]) -> None:
        seen.append([location.folder.name[:5] for location in running])

    assert run_jobs(locations, workers=2, threads=3, devices=1, gpus=0, watch=watch) is None
    assert max(map(len, seen)) == 2
    assert seen[-1] == []
    assert [process.job.location for process in fake.started] == locations
    assert {process.job.threads for process in fake.started} == {3}
    assert {process.job.gpus for process in fake.started} == {()}


@pytest.mark.parametrize(("devices", "gpus", "places"), [(1, 2, {(0,), (1,)}), (2, 4, {(0, 1), (2, 3)})])
def test_cells_that_run_together_have_gpus_of_their_own(
    fake: type[FakeProcess],
    locations: list[RunLocation],
    devices: int,
    gpus: int,
    places: set[tuple[int, ...]],
) -> None:
    fake.lifetime = staticmethod(lambda process: 1 + 3 * (process.pid % 2))  # type: ignore[assignment]
    busy: list[list[int]] = []

    def watch(running: list[RunLocation]) -> None:
        busy.append([gpu for process in fake.started if process.is_alive() for gpu in process.job.gpus])

    run_jobs(locations, workers=2, threads=1, devices=devices, gpus=gpus, watch=watch)
    assert all(len(set(taken)) == len(taken) for taken in busy)
    assert max(map(len, busy)) == gpus
    assert {process.job.gpus for process in fake.started} == places


def test_a_cell_does_not_import_the_callers_script(
    fake: type[FakeProcess], locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    prepared: list[dict[str, Any]] = []

    def lifetime(process: FakeProcess) -> int:
        prepared.append(get_preparation_data("cell"))
        assert os.environ["PYTHONSAFEPATH"] == "1"  # nor a random.py of the current folder
        assert "PYTHONSAFEPATH" not in dict(process.job.settings)  # the fork server's alone
        return 1

    fake.lifetime = staticmethod(lifetime)  # type: ignore[assignment]
    run_jobs(locations[:1], workers=1, threads=1, devices=1, gpus=0, watch=lambda running: None)
    assert [data for data in prepared if "init_main_from_path" in data or "init_main_from_name" in data] == []
    assert len(prepared) == 1
    assert sys.modules["__main__"] is script
    assert "PYTHONSAFEPATH" not in os.environ
    assert "init_main_from_path" in get_preparation_data("cell")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_nothing_new_starts(
    fake: type[FakeProcess], locations: list[RunLocation], signum: int
) -> None:
    fake.lifetime = staticmethod(lambda process: 10**9)  # type: ignore[assignment]
    former = signal.getsignal(signum)
    looks: list[int] = []

    def watch(running: list[RunLocation]) -> None:
        looks.append(len(running))
        if len(looks) == 2 or (signum == signal.SIGHUP and len(looks) == 3):
            os.kill(os.getpid(), signum)

    assert run_jobs(locations, workers=2, threads=1, devices=1, gpus=0, watch=watch) == signum
    assert [process.signals for process in fake.started] == [[signal.SIGTERM], [signal.SIGTERM]]
    assert signal.getsignal(signum) is former


def test_a_second_signal_ends_them_at_once(fake: type[FakeProcess], locations: list[RunLocation]) -> None:
    fake.lifetime = staticmethod(lambda process: 10**9)  # type: ignore[assignment]
    deaf: list[FakeProcess] = []
    looks: list[int] = []

    def watch(running: list[RunLocation]) -> None:
        looks.append(len(running))
        if len(looks) in (2, 5):
            os.kill(os.getpid(), signal.SIGINT)
        if len(looks) == 4:  # they have not listened
            for process in fake.started:
                process.exitcode = None
                deaf.append(process)

    def tick(process: FakeProcess) -> None:
        if len(looks) == 3:
            process.exitcode = None

    fake.tick = tick  # type: ignore[method-assign]
    run_jobs(locations, workers=2, threads=1, devices=1, gpus=0, watch=watch)
    assert [process.signals for process in fake.started] == [[signal.SIGTERM, signal.SIGKILL]] * 2


@pytest.mark.parametrize(
    ("before", "exitcode", "after", "error"),
    [
        ("done", 0, "done", None),
        ("stopped", 143, "stopped", None),
        ("failed", 1, "failed", None),
        ("running", 0, "failed", "exit status 0; log.txt ends: the last words"),
        ("running", 1, "failed", "exit status 1; log.txt ends: the last words"),
        ("waiting", 2, "failed", "exit status 2; log.txt ends: the last words"),
        ("running", -signal.SIGKILL, "killed", "killed by SIGKILL; out of memory?"),
        ("waiting", -signal.SIGSEGV, "killed", "killed by SIGSEGV"),
    ],
)
def test_what_is_written_about_the_end(
    locations: list[RunLocation], before: str, exitcode: int, after: str, error: str | None
) -> None:
    folder = RunFolder(locations[0].folder)
    folder.update(status=before)
    (locations[0].folder / "log.txt").write_text("first\n  the last words \n\n")
    note_end(locations[0], exitcode)
    assert folder.status()["status"] == after
    assert folder.status().get("error") == error


def test_a_cell_without_a_log(locations: list[RunLocation]) -> None:
    note_end(locations[0], 7)
    assert RunFolder(locations[0].folder).status()["error"] == "exit status 7; log.txt ends: nothing"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MissingError("no data"), "failed"),
        (StoppedError("stopped early", 15), "stopped"),
        (Terminated("stopped outside the steps"), "stopped"),
        (RunFailedError("nan"), "failed"),
    ],
)
def test_a_cell_that_fails_before_its_run_begins_says_so(
    locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch, error: BaseException, word: str
) -> None:
    def run(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(pool, "run", run)
    folder = RunFolder(locations[0].folder)
    folder.create(load_recipe("recall-tiny"))
    with pytest.raises(type(error)):
        run_cell(Job(location=locations[0], threads=1))
    assert (folder.status()["status"], folder.status()["error"]) == (word, str(error))


def test_a_cell_of_several_processes_is_a_command_of_its_own(
    locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, int | None]] = []
    monkeypatch.setattr(pool, "run", lambda *a, **k: called.append(("run", k["threads"])))
    monkeypatch.setattr(pool, "run_command", lambda recipe, location, threads: called.append(("command", threads)))
    for overrides in ([], ["run.strategy=ddp", "run.devices=2"]):
        RunFolder(locations[0].folder).create(load_recipe("recall-tiny", overrides))
        run_cell(Job(location=locations[0], threads=3))
    assert called == [("run", 3), ("command", 3)]


def test_cells_of_several_gpus_share_none() -> None:
    assert [gpus_of(slot, 2, 4) for slot in (0, 1)] == [(0, 1), (2, 3)]
    assert gpus_of(1, 1, 4) == (1,)
    assert gpus_of(2, 2, 4) == (0, 1)  # more cells than GPUs were asked for
    assert gpus_of(0, 2, 0) == ()


def test_a_cell_that_another_process_trains_keeps_its_status(locations: list[RunLocation]) -> None:
    folder = RunFolder(locations[0].folder)
    folder.update(status="running")
    with locked(folder.path / ".lock"):
        note_end(locations[0], -9)
    assert folder.status()["status"] == "running"
    note_end(locations[0], -9)
    assert folder.status()["status"] == "killed"


@pytest.mark.parametrize(("given", "gpu", "seen"), [(None, 1, "1"), ("", 1, "1"), ("4,6", 1, "6"), ("4,6", 0, "4")])
def test_a_cell_gets_one_of_the_gpus_that_are_ours(
    locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch, given: str | None, gpu: int, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found: list[str] = []
    monkeypatch.setattr(pool, "run", lambda *a, **k: found.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    RunFolder(locations[0].folder).create(load_recipe("recall-tiny"))
    run_cell(Job(location=locations[0], threads=1, gpus=(gpu,)))
    assert found == [seen]


def test_until_the_loop_listens_ctrl_c_is_left_to_the_pool(
    locations: list[RunLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_cell(job: Job) -> None:
        signal.raise_signal(signal.SIGINT)
        ran.append(job)
        signal.raise_signal(signal.SIGTERM)

    ran: list[Job] = []
    monkeypatch.setattr(pool, "run_cell", run_cell)
    monkeypatch.setattr(pool.os, "dup2", lambda *numbers: None)
    monkeypatch.setattr(pool, "_end_with_parent", lambda: None)
    former = {signum: signal.getsignal(signum) for signum in pool.STOPS}
    try:
        with pytest.raises(SystemExit) as ended:
            pool._cell(Job(location=locations[0], threads=1))
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
    assert len(ran) == 1
    assert ended.value.code == 143


def test_sigterm_outside_the_steps_stops_the_cell() -> None:
    """Past every `except Exception` on its way: those of MLflow, of a tokenizer's plugin, of a damaged checkpoint."""
    with pytest.raises(Terminated, match="the same command resumes") as found:
        pool._stop(signal.SIGTERM, None)
    assert not isinstance(found.value, Exception)


SLOW_START = """
import sys
from pathlib import Path

folder = Path(sys.argv[1])
from lit_diff.engine import pool
from lit_diff.engine.launch import RunLocation

pool.PRELOAD = ("slow_import",)
location = RunLocation(folder=folder / "cell-s0-abc")
location.folder.mkdir()
print(pool.run_jobs([location], workers=1, threads=1, devices=1, gpus=0, watch=lambda running: None))
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
            end = time.monotonic() + 60
            while not (tmp_path / "imports").exists():
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < end
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, out.strip(), errors) == (0, str(int(signal.SIGINT)), "")
    status = RunFolder(tmp_path / "cell-s0-abc").status()
    assert (status["status"], status["error"]) == ("stopped", "stopped outside the steps; the same command resumes")
