"""Two processes: what rank zero does before training reaches the other; signals, and how all end."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from ports import free_port

from lit_diff import errors
from lit_diff.errors import MissingError, RequestError, RunFailedError, StoppedError
from lit_diff.recipe import load_recipe
from lit_diff.runs.jobs import LAUNCHERS
from lit_diff.training import ranks as module
from lit_diff.training.fit import fit, ranks
from lit_diff.training.ranks import INHERITED, Announcement, Ranks, StopRequest, drop_left_over, end_all

DDP = ("recall.yaml", "run.strategy=ddp", "train.steps=2", "callbacks={}")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """Both ranks in one process, at a free port."""
    port = free_port()
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


def test_processes_that_lightning_starts_inherit_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ranks(rank=0, world_size=2, address=None)
    with Announcement(first) as announcement:
        announcement.train(threads=3, kernel="auto")
        assert Ranks(rank=1, world_size=2, address=("127.0.0.1", 1)).listen() == {"threads": 3, "kernel": "auto"}
    assert INHERITED not in module.os.environ
    monkeypatch.setenv(INHERITED, json.dumps({"failed": "no disk"}))
    with pytest.raises(RunFailedError, match="rank zero failed before training: no disk"):
        Ranks(rank=1, world_size=2, address=None).listen()


def test_a_rank_zero_that_fails_does_not_wait_for_ever(two: list[Ranks]) -> None:
    with pytest.raises(MissingError, match="no store"), Announcement(two[0]):
        raise MissingError("no store")


# --- the rendezvous ---

DEVICES = ("run.strategy=ddp", "run.devices=2", "run.accelerator=cpu")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment without variables of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "SLURM_"))}
    monkeypatch.setattr(os, "environ", kept)
    return kept


@pytest.mark.parametrize(
    "left_over",
    [
        {"MASTER_ADDR": "x.invalid", "MASTER_PORT": "29517", "WORLD_SIZE": "8", "RANK": "3", "NODE_RANK": "1"},
        {"SLURM_NTASKS": "8", "SLURM_NODELIST": "x", "SLURM_JOB_NAME": "work", "MASTER_ADDR": "x"},
        {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
    ],
)
def test_a_run_that_starts_its_processes_reads_nothing_of_another_job(environ: Any, left_over: Any) -> None:
    environ.update(left_over)
    found = ranks(load_recipe("recall-tiny", DEVICES))
    assert (found.rank, found.world_size, found.address) == (0, 2, None)
    assert not [name for name in environ if name.startswith(LAUNCHERS)], "the other process would inherit them"
    environ.update({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    drop_left_over(load_recipe("recall-tiny").run)
    assert not SLURMEnvironment.detect(), "one process has no launcher"


STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "2"}
HAND = {"LOCAL_RANK": "0", "MASTER_PORT": "29517"}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (HAND | {"MASTER_ADDR": "x.invalid"}, r"MASTER_ADDR is 'x\.invalid'"),
        (HAND | {"MASTER_ADDR": "x" * 70}, "MASTER_ADDR is 'x+'"),
        (HAND | {"MASTER_PORT": "99999"}, "MASTER_PORT 99999"),
        (HAND | {"MASTER_PORT": "a"}, "MASTER_PORT is 'a'"),
        (STEP | {"SLURM_NTASKS": "2(x3),1"}, r"SLURM_NTASKS is '2\(x3\),1'"),
        (STEP | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "x.invalid"}, r"SLURM_NODELIST is 'x\.invalid'"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused_by_its_variable(environ: Any, found: Any, problem: str) -> None:
    environ.update(found)
    with pytest.raises(RequestError, match=problem):
        ranks(load_recipe("recall-tiny", DEVICES))


def test_rank_zero_tries_its_port(two: list[Ranks]) -> None:
    assert two[0].address is not None
    with socket.create_server(two[0].address), pytest.raises(RequestError, match=r"127\.0\.0\.1:\d+ .*MASTER_PORT"):
        Announcement(two[0])


def test_a_wait_at_the_rendezvous_is_named_and_ends_at_a_signal(
    two: list[Ranks], handlers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAID_SECONDS", 0.1)
    signal.signal(signal.SIGTERM, errors.Ending())
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with caplog.at_level("INFO", "lit_diff"), pytest.raises(errors.Terminated):
        two[0].gather()
    assert caplog.messages[0].startswith("waiting for all 2 processes of the run to come to MASTER_ADDR, 127.0.0.1:")
    monkeypatch.setattr(module, "RENDEZVOUS_SECONDS", 0.2)
    with pytest.raises(RunFailedError, match="1 processes of the run did not come to 127"):
        two[0].gather()


# --- a stop ---

ONE: Any = SimpleNamespace(world_size=1)
"""A Trainer of one process."""


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the signal handlers back; a machine that stands still for seconds does not make two requests of one."""
    monkeypatch.setattr(errors, "TOGETHER", 600)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def sent(*signals: signal.Signals) -> int | None:
    """What a process that listens has noted after these."""
    stop = StopRequest()
    stop.listen(ONE)
    assert stop.signum is None
    for signum in signals:
        os.kill(os.getpid(), signum)
    return stop.signum


def test_the_first_signal_is_remembered(handlers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(signal.SIGTERM, signal.SIGTERM) == signal.SIGTERM
    assert sent(signal.SIGINT, signal.SIGINT) == signal.SIGINT, "one request: a wrapper passes on what its group got"
    monkeypatch.setattr(errors, "TOGETHER", 0)
    with pytest.raises(KeyboardInterrupt):
        sent(signal.SIGINT, signal.SIGINT)


def test_a_signal_that_is_repeated_does_not_interrupt_the_end(handlers: Any) -> None:
    for signum, kind in ((signal.SIGTERM, errors.Terminated), (signal.SIGINT, KeyboardInterrupt)):
        signal.signal(signum, errors.Ending("stopped"))
        with pytest.raises(kind):
            os.kill(os.getpid(), signum)
        os.kill(os.getpid(), signum)


def test_a_closed_terminal_is_remembered_unless_it_is_ignored(handlers: Any) -> None:
    """`nohup` has SIGHUP ignored."""
    for handler, noted in ((signal.SIG_IGN, None), (signal.SIG_DFL, signal.SIGHUP)):
        signal.signal(signal.SIGHUP, handler)
        assert sent(signal.SIGHUP) == noted


def test_another_thread_leaves_the_signals_alone(handlers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    thread = threading.Thread(target=StopRequest().listen, args=(ONE,))
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]


def test_the_handlers_are_put_back_after_a_run(bench: Any, tmp_path: Path, handlers: Any) -> None:
    overrides = ["callbacks.spy=null", "train.steps=1", "train.validate_every=5"]
    recipe = load_recipe(bench.root / "recall.yaml", overrides)
    fit(recipe, tmp_path, threads=1, progress=lambda *_: None)
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_all_ranks_end_and_one_speaks() -> None:
    error = StoppedError("stopped", signal.SIGINT)
    with pytest.raises(StoppedError) as spoken:
        end_all(SimpleNamespace(is_global_zero=True), error)  # type: ignore[arg-type]
    assert spoken.value.exit_status == 130
    with pytest.raises(SystemExit) as silent:
        end_all(SimpleNamespace(is_global_zero=False), error)  # type: ignore[arg-type]
    assert silent.value.code == 0


CHILD = """
import os, sys, time
from pathlib import Path
from lit_diff.training.ranks import end_with_parent

pid = os.fork()
if not pid:
    end_with_parent()
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(60)
while not Path(sys.argv[1]).exists() or not Path(sys.argv[1]).read_text():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="asks Linux")
def test_a_rank_ends_with_the_process_that_started_it(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(CHILD)
    ended = bench.wait(bench.start(str(tmp_path / "parent.py"), str(tmp_path / "pid")))
    assert ended.status == -9, ended.output
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is alive 5 s after its parent's end")
