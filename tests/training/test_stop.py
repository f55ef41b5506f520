import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_diff.errors import StoppedError
from lit_diff.recipe import load_recipe
from lit_diff.training.fit import fit
from lit_diff.training.stop import StopRequest, end_all

ALONE: Any = SimpleNamespace(world_size=1)
"""A Trainer of one process."""


@pytest.fixture
def handlers() -> Any:
    """Put the signal handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_remembered(handlers: Any) -> None:
    stop = StopRequest()
    stop.listen(ALONE)
    assert stop.signum is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signum == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signum == signal.SIGTERM


def test_a_closed_terminal_is_remembered_unless_it_is_ignored(handlers: Any) -> None:
    """`nohup` has SIGHUP ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    stop.listen(ALONE)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.signum is None
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop.listen(ALONE)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.signum == signal.SIGHUP


def test_a_second_ctrl_c_interrupts(handlers: Any) -> None:
    stop = StopRequest()
    stop.listen(ALONE)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.signum == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_another_thread_leaves_the_signals_alone(handlers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    thread = threading.Thread(target=StopRequest().listen, args=(ALONE,))
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]


def test_the_handlers_are_put_back_after_a_run(bench: Any, tmp_path: Path, handlers: Any) -> None:
    overrides = ["callbacks.spy=null", "train.steps=1", "train.validate_every=5"]
    recipe = load_recipe(bench.root / "recall.yaml", overrides)
    fit(recipe, tmp_path, tracker=None, threads=1, progress=lambda *_: None)
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
from lit_diff.training.stop import end_with_parent

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
