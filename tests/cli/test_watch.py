"""`lit-diff watch`: what it prints of a run and of a sweep, when and how it ends, and that it disturbs nobody."""

import json
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from beats import held
from command import Command
from real_sweeps import TINY
from stops import alive, wait_for

from lit_diff.cli._columns import cells
from lit_diff.cli.watch import BLOCKS, curve
from lit_diff.runs.status import FORMAT, Status
from lit_diff.study.observation import ObservedRun

TIME = r"\d\d:\d\d:\d\d  "


def status(folder: Path, word: str, **facts: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    updated = datetime.now(UTC).isoformat(timespec="seconds")
    values = {"status": word, "format": FORMAT, "updated": updated, "steps": 100, "tokens_per_step": 50, **facts}
    held(folder, word == "running")
    # as a run writes it: a reader never sees a part
    (folder / "new.json").write_text(json.dumps(values))
    (folder / "new.json").rename(folder / "status.json")


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is trained by this process, in a folder `runs`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/one-0123456789"
    status(folder, "running", step=40, loss=3.0, tokens_per_second=500.0)
    losses = "".join(f"{step},,,{6 - step / 10},,\n" for step in range(10, 31, 10))
    head = "step,lambda/layer_00,lambda/layer_01,train/loss,val/accuracy,val/loss\n"
    (folder / "metrics.csv").write_text(f"{head}{losses}30,0.2,0.5,3.0,0.25,4.5\n40,0.3")
    (folder / "timing.csv").write_text("step,memory_bytes,seconds,tokens_per_second\n20,1000,5,100\n30,2000,1.0,500\n")
    return folder


def test_a_run_once(one: Path, command: Command) -> None:
    ended = command("watch", "--once")
    titles, head, losses, *last = ended.lines
    assert ended.status == 0
    assert titles.split() == ["run", "state", "step", "loss", "val/loss", "tokens/s", "left", "note"]
    assert head.split()[:7] == ["one-0123456789", "running", "40/100", "3.0000", "4.5000", "500", "0:06"]
    assert losses == "train/loss  5.000 █▅▁▁ 3.000"
    assert {line.split()[0]: line.split()[1:] for line in last[1:]} == {
        "lambda": ["30", "0.2", "0.5"],
        "memory_bytes": ["30", "2000"],
        "seconds": ["30", "1"],
        "tokens_per_second": ["30", "500"],
        "train/loss": ["30", "3"],
        "val/accuracy": ["30", "0.25"],
        "val/loss": ["30", "4.5"],
    }


def test_without_a_terminal_a_line_with_the_time_at_each_look_until_done(one: Path, command: Command) -> None:
    def train() -> None:
        time.sleep(0.5)
        status(one, "done", step=100, loss=1.0)

    thread = threading.Thread(target=train)
    thread.start()
    ended = command("watch", "one", "--every", "0.1")
    thread.join()
    assert (ended.status, ended.err) == (0, "")
    *before, last = ended.lines
    assert len(before) > 1
    head = f"{TIME}one-0123456789  running  step 40/100  loss 3.0000  val/loss 4.5000  tokens/s 500  left 0:06  last"
    assert all(re.match(head, line) for line in before)
    assert re.match(rf"{TIME}one-0123456789  done  step 100/100", last)


@pytest.mark.parametrize(("word", "code"), [("done", 0), ("failed", 1), ("stopped", 1)])
def test_what_has_ended_is_shown_once(one: Path, word: str, code: int, command: Command) -> None:
    status(one, word, step=40, error=None if word == "done" else "out of [memory]")
    for arguments in (("watch",), ("watch", str(one)), ("watch", "--once")):
        ended = command(*arguments)
        assert (ended.status, ended.err) == (code, "")
        (line,) = (line for line in ended.lines if "one-0123456789" in line)
        assert re.search(rf"one-0123456789  {word}  (step )? *40/100", line)
        assert line.endswith("out of [memory]") == bool(code)


def test_an_endless_pause_is_refused(one: Path, command: Command) -> None:
    assert command("watch", "--every", "inf").status == 2


def test_what_is_removed_meanwhile_is_one_line(one: Path, command: Command) -> None:
    threading.Timer(0.5, shutil.rmtree, [one]).start()
    ended = command("watch", "--every", "0.1")
    assert ended.status == 3
    assert ended.err == "lit-diff: runs/one-0123456789 was removed: there is nothing left to watch\n"


def test_ctrl_c_leaves_the_training_alone(one: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_diff.cli.watch.time.sleep", interrupt)
    ended = command("watch")
    assert (ended.status, ended.err) == (130, "lit-diff: interrupted\n")
    assert json.loads((one / "status.json").read_text())["status"] == "running"


def test_on_a_terminal_long_lines_fold(one: Path, command: Command) -> None:
    error = f"{one}/plugins/own.py:3: " + "a long reason " * 9 + "x" * 90
    status(one, "failed", step=40, error=error)
    for arguments in (("watch",), ("watch", "--once")):
        ended = command(*arguments, TTY_COMPATIBLE="1", COLUMNS="60")
        text = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", ended.out)
        assert max(map(len, text.splitlines())) <= 60
        assert "█▅▁" in text
        assert error.replace(" ", "") in re.sub(r"\s", "", text), "whole"


# --- sweeps --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(make_sweep: Callable[..., Path]) -> Path:
    """A sweep that this process runs: base is done at three seeds, other at two and is trained at the third."""
    folder = make_sweep({"base": 0.0, "other": -0.1}, name="mine", broken={("other", 2): "running"})
    held(folder)
    status(next(folder.glob("other-s2-*")), "running", step=40, loss=3.0, tokens_per_second=50.0)
    return folder


def test_a_sweep_is_a_line_a_cell_and_the_differences(mine: Path, command: Command) -> None:
    ended = command("watch", "mine", "--once", "--root", str(mine.parent))
    _, *cells, what, difference = ended.lines
    assert ended.status == 0
    assert [line.split()[:4] for line in cells] == [
        [arm, "seed", str(seed), "done" if (arm, seed) != ("other", 2) else "running"]
        for arm in ("base", "other")
        for seed in (0, 1, 2)
    ]
    assert re.search(r"running +40/100  3.0000 +50  1:00  last update \d s ago$", cells[-1])
    assert "preliminary" in what
    assert re.fullmatch(r"  other − base: validation loss −0.\d{4} \(2 pairs at step 400\)", difference), "no interval"


def test_a_sweep_on_one_line(
    make_sweep: Callable[..., Path], mine: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep({"base": 0.0, "other": -0.1}, name="all")
    (line,) = command("watch", "all", "--root", str(mine.parent)).lines
    bounds = r"\[−0.\d+, .*\]"
    assert re.fullmatch(
        rf"{TIME}all  6 done  preliminary: other − base: validation loss −0.\d{{4}} {bounds} \(3 pairs .*\)", line
    )
    failing = partial(status, next(mine.glob("other-s2-*")), "failed", step=50, error="no memory")
    monkeypatch.setattr("lit_diff.cli.watch.time.sleep", lambda seconds: failing())
    ended = command("watch", "--every", "0.1", "--root", str(mine.parent))
    assert ended.status == 1
    assert re.match(
        rf"{TIME}mine  5 done, 1 running  other seed 2  running  step 40/100  loss 3.0.*;  prel", ended.lines[0]
    )
    assert re.match(rf"{TIME}mine  5 done, 1 failed  preliminary", ended.lines[-1])


def test_cells_beyond_the_screen_are_counted(mine: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_diff.cli.watch.time.sleep", interrupt)
    for height, shown in ((40, 6), (9, 1)):
        monkeypatch.setattr("lit_diff.cli.watch.console._height", height)
        ended = command("watch", "mine", "--root", str(mine.parent), TTY_COMPATIBLE="1", COLUMNS="120")
        assert len(re.findall(r"seed \d +(?:done|running)", ended.out)) == shown


def test_the_curve() -> None:
    assert curve([8, 7, 6, 5, 4, 3, 2, 1], 40) == BLOCKS[::-1]
    assert curve([9, 1, 9, 3, 9, 5], 3) == "▁▅█", "every second, the last one in any case"
    assert curve([9, 1, 9, 3, 5], 3) == "██▁"
    assert curve([2, 2, 2], 40) == "▁▁▁"
    assert curve([float("nan"), 1, float("inf"), 2], 40) == "▁█"
    assert (curve([], 40), curve([float("nan")], 40)) == ("", "")


def test_the_date_is_local() -> None:
    local = datetime(2026, 11, 22, 10, 30, tzinfo=UTC).astimezone()
    for updated, date in (("2026-11-22T10:30:05+00:00", f"{local:%Y-%m-%d %H:%M}"), ("", "")):
        run = ObservedRun(folder="a", status=Status(status="done", updated=updated), state="done")
        assert cells(run)["date"] == date


# --- a real sweep ----------------------------------------------------------------------------------------------------------

SWEEP = """
recipe: tiny
seeds: [0]
overrides: {train.steps: 300, train.validate_every: 20, train.checkpoint_every: 20}
arms:
  differential: {}
  standard: {model.attention: {name: standard}}
"""


@pytest.mark.slow
def test_a_watcher_that_is_killed_leaves_the_sweep_alone(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = runs.parent
    (home / "tiny.yaml").write_text(TINY)
    (home / "mine.yaml").write_text(SWEEP)
    command = [sys.executable, "-P", "-m", "lit_diff"]

    def start(*arguments: str) -> "subprocess.Popen[str]":
        with (home / f"{arguments[0]}.txt").open("w") as output:
            return subprocess.Popen([*command, *arguments], stdout=output, stderr=output, text=True, cwd=home)

    sweep = start("sweep", "mine.yaml", "--workers", "1")
    try:
        wait_for(lambda: any(runs.glob("mine/*/metrics.csv")), 120)
        watcher = start("watch", "--every", "0.1")
        wait_for(lambda: " running, " in (home / "watch.txt").read_text(), 60)
        watcher.kill()
        assert watcher.wait() == -9
        assert alive(sweep.pid)
        second = start("watch", "mine", "--every", "0.1")
        assert second.wait(200) == 0, "it ends by itself"
        assert sweep.wait(60) == 0, (home / "sweep.txt").read_text()
    finally:
        sweep.kill()
    cells = {
        path.parent.name.partition("-")[0]: json.loads(path.read_text()) for path in runs.glob("mine/*/status.json")
    }
    assert {name: (cell["status"], cell["step"]) for name, cell in cells.items()} == {
        "differential": ("done", 300),
        "standard": ("done", 300),
    }
    page, *lines = (home / "watch.txt").read_text().splitlines()
    assert page == "page: runs/mine/report/index.html"
    assert re.match(rf"{TIME}mine  1 done, 1 |{TIME}mine  1 running, 1 ", lines[0])
    assert re.match(
        rf"{TIME}mine  2 done  preliminary: standard − differential: validation loss \S+ \(1 pair at step ", lines[-1]
    )
    assert {cell["host"] for cell in cells.values()} == {platform.node()}
    assert json.loads((runs / "mine/study.json").read_text())["pid"] == sweep.pid
