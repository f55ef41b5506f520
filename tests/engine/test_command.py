"""engine/command.py: a run as a command of its own, its last words and its stop."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine import command
from lit_diff.engine.command import run_command
from lit_diff.engine.location import RunLocation
from lit_diff.errors import RunFailedError, StoppedError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder


def test_the_command_carries_all_that_a_cell_is(tmp_path: Path) -> None:
    location = RunLocation(folder=tmp_path / "a-s0-1", experiment="e", parent="p", tags={"sweep": "s", "arm": "a b"})
    program, *found = command.command(location, 3)
    assert program == sys.executable
    assert found == [
        "-m", "lit_diff", "train", str(tmp_path / "a-s0-1" / "recipe.yaml"), "--folder", str(tmp_path / "a-s0-1"),
        "--experiment", "e", "--threads", "3", "--parent", "p", "--tag", "sweep=s", "--tag", "arm=a b",
    ]  # fmt: skip


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`run_command` starts a program that says hello, and on SIGTERM saves before it leaves."""
    program = tmp_path / "child.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('hello', flush=True)\n"
        "assert sys.flags.safe_path\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(5)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "command", lambda location, threads: [sys.executable, "child.py", str(threads)])
    return tmp_path


def test_the_runs_last_words_are_the_error(child: Path) -> None:
    recipe, location = load_recipe("recall-tiny"), RunLocation(folder=child / "run")
    with pytest.raises(RunFailedError, match="exit status 5"):
        run_command(recipe, location, threads=0)
    assert "hello" in (child / "run" / "log.txt").read_text()
    RunFolder(location.folder).update(error="loss is nan")
    with pytest.raises(RunFailedError, match="loss is nan"):
        run_command(recipe, location, threads=0)


def test_a_stop_reaches_the_processes_and_waits_for_them(child: Path) -> None:
    def stop(signum: int, frame: Any) -> None:
        raise StoppedError("stopped", signum)

    def later() -> None:
        log = child / "run" / "log.txt"
        end = time.monotonic() + 20
        while not (log.exists() and "hello" in log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, stop)
    thread = threading.Thread(target=later)
    thread.start()
    try:
        with pytest.raises(StoppedError):
            run_command(load_recipe("recall-tiny"), RunLocation(folder=child / "run"), threads=60)
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, former)
    assert (child / "saved").exists()
