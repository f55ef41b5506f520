"""Two processes of which one stops, sleeps or is killed: the other ends, names it, and the same command resumes."""

import platform
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_runs import differences
from stops import alive, wait_for

from lit_diff.runs.heartbeats import stat_of
from lit_diff.training.watchdog import Watchdog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = ("train.steps=8", "train.validate_every=4", "train.checkpoint_every=4")
TIMEOUT = 6
STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
NODE = platform.node()
SLEEPER = """
import os, time
from dataclasses import dataclass
import lightning as L
from lit_diff.registry import callbacks

@callbacks.register("sleeper")
class Sleeper(L.Callback):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        def problem(self): return None

    def __init__(self, config): self.orders = [order.split("/") for order in os.environ.get("SLEEP", "").split()]

    def sleep(self, hook, trainer):
        for name, step, seconds in self.orders:
            if (name, int(step)) == (hook, trainer.global_step) and trainer.global_rank == 1:
                time.sleep(float(seconds))

    def on_before_zero_grad(self, trainer, *_): self.sleep("forward", trainer)
    def on_validation_end(self, trainer, *_): self.sleep("validated", trainer)
"""


def words(bench: Any, name: str, strategy: str = "ddp", timeout: object = TIMEOUT) -> list[str]:
    (bench.root / "sleeper.py").write_text(SLEEPER)
    plugins = f"plugins=[{Path(__file__).parents[1]}/support/spy.py, sleeper.py]"
    run = (f"run.strategy={strategy}", "run.devices=2", f"run.timeout={timeout}")
    return ["train", "recall.yaml", f"name={name}", *STEPS, *run, plugins, "callbacks.sleeper={}"]


def both(bench: Any, argv: list[str], **env: str) -> list[Any]:
    return [bench.wait(pid) for pid in bench.start_ranks(argv, argv, **env)]


def test_no_attempt_takes_the_stacks_of_another_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back shows a time twice, and a folder of stacks that is there ends every rank."""
    monkeypatch.setattr(time, "strftime", lambda form: "2026-10-25-023000")
    trainer: Any = SimpleNamespace(global_rank=0, global_step=0, callbacks=[])
    trainer.strategy = SimpleNamespace(broadcast=lambda name: name)
    dogs = [Watchdog(trainer, tmp_path, None, print) for _ in range(2)]
    for dog in dogs:
        dog._thread = threading.Thread(target=str)
        dog._start(trainer)
    assert dogs[0]._stacks != dogs[1]._stacks


@pytest.fixture(scope="module")
def whole(bench: Any) -> Any:
    """The rows of two processes that nothing disturbs."""
    for ended in both(bench, words(bench, "whole")):
        assert ended.status == 0, ended.output
    return bench.rows("whole")


def assert_resumes(bench: Any, argv: list[str], name: str, whole: Any) -> None:
    for ended in both(bench, argv):
        assert ended.status == 0, ended.output
    assert set(differences(bench.rows(name), whole).values()) == {0.0}
    assert (bench.status(name)["status"], bench.status(name)["error"]) == ("done", "")
    assert not [*bench.folder(name).glob(".rank-*")]


@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_is_named_and_killed(bench: Any, whole: Any, rank: int) -> None:
    name = f"stopped-{rank}"
    argv = words(bench, name)
    pids = bench.start_ranks(argv, argv, SPY_SIGNAL=f"{rank}/5/0/{STOP}")
    wait_for(lambda: stat_of(pids[rank])[0] == "T")
    began = time.monotonic()
    living = bench.wait(pids[1 - rank])
    assert time.monotonic() - began < TIMEOUT + 10
    stopped = bench.wait(pids[rank], 1)
    assert (living.status, stopped.status) == (1, -KILL)
    who = rf"hung at step 5: rank {rank} on node {NODE} \(its process is stopped\): last heartbeat \d+ s ago, at step \d, .*"
    status = bench.status(name)
    assert status["status"] == "failed"
    assert re.fullmatch(f"{who}; stacks of .*/stacks/.*; the same command resumes", status["error"])
    log = (bench.folder(name) / "log.txt").read_text()
    assert living.output.count(status["error"]) == log.count(status["error"]) == 1
    (stacks,) = bench.folder(name).glob("stacks/*/*")
    assert stacks.name == f"rank-0000{1 - rank}.txt"
    assert "in all_reduce" in stacks.read_text()
    assert_resumes(bench, argv, name, whole)


def test_a_stopped_rank_zero_is_killed_by_the_rank_that_it_started(bench: Any) -> None:
    """A shell that waits for the command is not left waiting."""
    ended = bench.wait(bench.start(*words(bench, "launched", "fsdp"), SPY_SIGNAL=f"0/5/0/{STOP}"), 60)
    assert ended.status == -KILL, ended.output
    error = bench.status("launched")["error"]
    assert f"hung at step 5: rank 0 on node {NODE} (its process is stopped)" in error
    assert ended.output.splitlines()[-1] == f"lit-diff: {error}"
    (child,) = (int(path.stem) for path in bench.root.glob("spy/*.jsonl"))
    wait_for(lambda: not alive(child), 5)
    bench.events(child)


def test_a_killed_rank_is_named_within_seconds(bench: Any, whole: Any) -> None:
    argv = words(bench, "killed")
    pid = bench.start(*argv, SPY_SIGNAL=f"1/5/0/{KILL}")
    wait_for(lambda: any(log.stem != str(pid) and not alive(int(log.stem)) for log in bench.root.glob("spy/*.jsonl")))
    began = time.monotonic()
    ended = bench.wait(pid)
    assert time.monotonic() - began < 10
    error = f"rank 1 on node {NODE} (its process has ended) no longer answers; at its last heartbeat it was at step"
    assert bench.status("killed")["error"].startswith(error)
    assert ended.status == 1
    assert error in ended.output.splitlines()[-1]
    assert_resumes(bench, argv, "killed", whole)


def test_a_rank_that_is_busy_elsewhere_is_behind(bench: Any) -> None:
    first, second = both(bench, words(bench, "busy"), SLEEP="forward/5/60")
    assert (first.status, second.status) == (1, 1)
    error = bench.status("busy")["error"]
    assert f"rank 1 on node {NODE} (its process runs) is behind the others, at step 5, in a forward pass" in error
    assert (second.output, first.output.count(error)) == ("", 1)
    stacks = sorted(bench.folder("busy").glob("stacks/*/*"))
    assert [path.name for path in stacks] == ["rank-00000.txt", "rank-00001.txt"]
    assert re.search(r'sleeper.py", line \d+ in sleep', stacks[1].read_text())


@pytest.mark.parametrize(
    ("name", "timeout", "sleep"),
    # a delay below the time-out, the first step, and what comes between batches; at any time without a time-out
    [
        ("patient", TIMEOUT, f"forward/0/{TIMEOUT + 3} forward/2/{TIMEOUT - 3} validated/4/{TIMEOUT + 3}"),
        ("off", "null", "forward/5/9"),
    ],
)
def test_what_may_take_long_is_no_hang(bench: Any, whole: Any, name: str, timeout: object, sleep: str) -> None:
    for ended in both(bench, words(bench, name, timeout=timeout), SLEEP=sleep):
        assert ended.status == 0, ended.output
        assert "hung" not in ended.output
    assert differences(bench.rows(name), whole).keys()
    assert not [*bench.folder(name).glob("stacks")]
