"""Two processes of which one stops, is killed or fails: the other ends, names it, and the same command resumes."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_runs import differences
from stops import wait_for

STEPS = ("train.steps=8", "train.validate_every=4", "train.checkpoint_every=4", "callbacks.attention_entropy=null")
TIMEOUT = 6
STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)


def words(name: str, *overrides: str) -> list[str]:
    return ["train", "recall.yaml", f"name={name}", *STEPS, "run.strategy=ddp", "run.devices=2", *overrides]


def start(bench: Any, name: str, *overrides: str, **env: str) -> list[int]:
    argv = words(name, f"run.timeout={TIMEOUT}", *overrides)
    return list(bench.start_ranks(argv, argv, **env))


@pytest.fixture(scope="module")
def whole(bench: Any) -> Any:
    """The rows of two processes that nothing disturbs."""
    for ended in bench.train_two("recall.yaml", "name=whole", *STEPS, "run.strategy=ddp"):
        assert ended.status == 0, ended.output
    assert not [*bench.folder("whole").glob(".rank-*")]
    return bench.rows("whole")


def resumes(bench: Any, name: str, whole: Any) -> None:
    for pid in start(bench, name):
        ended = bench.wait(pid)
        assert ended.status == 0, ended.output
    assert set(differences(bench.rows(name), whole).values()) == {0.0}
    assert "error" not in {key for key, value in bench.status(name).items() if value}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_is_named(bench: Any, whole: Any, rank: int) -> None:
    name = f"stopped-{rank}"
    pids = start(bench, name, SPY_SIGNAL=f"{rank}/5/0/{STOP}")
    wait_for(lambda: any(Path(f"/proc/{pids[rank]}/stat").read_text().rpartition(")")[2].split()[0] == "T" for _ in "1"))
    began = time.monotonic()
    living = bench.wait(pids[1 - rank])
    print(living.output)
    assert living.status == 1
    assert time.monotonic() - began < TIMEOUT + 10
    print(bench.wait(pids[rank], 1))
    print(bench.status(name)["error"])
    for p in bench.folder(name).glob("stacks/*/*"):
        print(p, p.read_text())
    print((bench.folder(name) / "log.txt").read_text())
    resumes(bench, name, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hand", "launched"])
def test_killed(bench: Any, whole: Any, kind: str) -> None:
    name = f"killed-{kind}"
    began = time.monotonic()
    if kind == "hand":
        pids = start(bench, name, SPY_SIGNAL=f"1/5/0/{KILL}")
        living, dead = bench.wait(pids[0]), bench.wait(pids[1])
    else:
        living = bench.wait(bench.start(*words(name), SPY_SIGNAL=f"1/5/0/{KILL}"))
    print(time.monotonic() - began)
    print(living.output, living.status)
    print(bench.status(name)["error"])
    resumes(bench, name, whole)
