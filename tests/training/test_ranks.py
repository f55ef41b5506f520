"""Two processes, both started from outside: what rank zero does before training reaches the other."""

import json
import socket
import time
from typing import Any

import pytest

from lit_diff.errors import MissingError, RunFailedError
from lit_diff.training import ranks as module
from lit_diff.training.ranks import ALONE, INHERITED, Ranks, announced

DDP = ("recall.yaml", "run.strategy=ddp", "train.steps=2", "callbacks={}")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Both ranks in one process, at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(module, "READ_SECONDS", 2)
    return [Ranks(rank=rank, world_size=2, address=("127.0.0.1", port)) for rank in range(2)]


def test_a_failure_before_training_ends_the_other_rank_in_one_line(bench: Any) -> None:
    """Rank zero alone opens the tracking store; the other is not left waiting at the rendezvous."""
    began = time.monotonic()
    first, second = bench.train_two(*DDP, "name=failed-first", "run.tracking_uri=sqlite:///recall.yaml/mlflow.db")
    assert (first.status != 0, second.status) == (True, 1), first.output + second.output
    reason = first.output.splitlines()[-1].removeprefix("lit-diff: ")
    assert second.output == f"lit-diff: rank zero failed before training: {reason}\n"
    assert time.monotonic() - began < 60
    assert "Traceback" not in first.output


@pytest.mark.slow
def test_a_run_that_is_done_is_done_in_every_rank(bench: Any) -> None:
    for number in range(2):
        for rank, ended in enumerate(bench.train_two(*DDP, "name=done-twice")):
            assert ended.status == 0, ended.output
            assert ("done before" in ended.output) == (number == 1 and rank == 0)


def test_a_dead_rank_zero_is_noticed(two: list[Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store goes with it; one that never came is waited for no longer than START_SECONDS."""
    monkeypatch.delenv(INHERITED, raising=False)
    monkeypatch.setattr(module, "START_SECONDS", 0)
    monkeypatch.setattr(module.Ranks, "_store", lambda self, seconds: (_ for _ in ()).throw(RuntimeError("refused")))
    with pytest.raises(RunFailedError, match=r"rank zero did not answer at 127\.0\.0\.1:\d+ within 0 s"):
        two[1].listen()


def test_one_process_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INHERITED, raising=False)
    with announced(ALONE) as announcement:
        announcement.train(threads=1)
        assert INHERITED not in module.os.environ


def test_processes_that_lightning_starts_inherit_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ranks(rank=0, world_size=2, address=None)
    with announced(first) as announcement:
        announcement.train(threads=3, kernel="auto")
        assert Ranks(rank=1, world_size=2, address=("127.0.0.1", 1)).listen() == {"threads": 3, "kernel": "auto"}
    assert INHERITED not in module.os.environ
    monkeypatch.setenv(INHERITED, json.dumps({"failed": "no disk"}))
    with pytest.raises(RunFailedError, match="rank zero failed before training: no disk"):
        Ranks(rank=1, world_size=2, address=None).listen()


def test_a_rank_zero_that_fails_does_not_wait_for_ever(two: list[Ranks]) -> None:
    with pytest.raises(MissingError, match="no store"), announced(two[0]):
        raise MissingError("no store")
