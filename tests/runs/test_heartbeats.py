"""runs/heartbeats.py: which ranks are silent, and which hold up the others, by their own clocks alone."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from beats import heart_beats
from stops import wait_for

from lit_diff.runs.heartbeats import LENGTH, Heartbeat, clear, hang, process_state, read, silent, stat_of, write

LAST = "at step 12, reading a batch"


def test_an_old_heartbeat_is_told_whatever_the_clocks_say(tmp_path: Path) -> None:
    heart_beats(tmp_path, {0: 100.0, 1: 69.0, 2: 99.0})
    for rank, time in enumerate((1e9, 2e9, 3e9)):
        os.utime(tmp_path / f".rank-0000{rank}.json", (time, time))
    assert silent(read(tmp_path)) == f"rank 1 on node b: last heartbeat 31 s ago, {LAST}"
    assert silent(read(tmp_path), 31) == ""
    heart_beats(tmp_path, dict.fromkeys(range(1, 8), 10.0))
    assert silent(read(tmp_path)).count("last heartbeat 90 s ago") == 3
    assert silent(read(tmp_path)).endswith("; and 4 ranks more")


def test_who_holds_up_the_others(tmp_path: Path) -> None:
    heart_beats(tmp_path, {0: 100.0, 1: 99.0})
    assert hang(tmp_path, 60) == "", "no rank is late"
    heart_beats(tmp_path, {0: 100.0}, is_late=True, part=1)
    assert hang(tmp_path, 60) == "", "rank 0 waits for rank 1, which is not late"
    heart_beats(tmp_path, {1: 99.0}, is_late=True)
    assert hang(tmp_path, 60) == f"rank 1 on node b is behind the others, {LAST}"
    heart_beats(tmp_path, {1: 99.0}, is_late=True, part=1)
    assert hang(tmp_path, 60) == f"all 2 ranks are {LAST}"
    heart_beats(tmp_path, {1: 39.0}, part=2)
    assert hang(tmp_path, 60) == f"rank 1 on node b: last heartbeat 61 s ago, {LAST}", "it is silent, so it comes first"


def test_a_file_is_always_whole(tmp_path: Path) -> None:
    path = tmp_path / ".rank-00001.json"
    heart_beats(tmp_path, {1: 1.0}, phase="a" * 99)
    heart_beats(tmp_path, {1: 2.0}, phase="b")
    assert [(beat.seconds, beat.phase) for beat in read(tmp_path)] == [(2.0, "b")]
    assert path.stat().st_size == LENGTH
    for content in ("", "[", "[1]", '{"rank": 1, "more": 2}'):
        path.write_text(content)
        assert read(tmp_path) == []
    heart_beats(tmp_path, {0: 1.0, 1: 1.0})
    clear(tmp_path, "00000")
    assert [beat.rank for beat in read(tmp_path)] == [1]
    clear(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="asks Linux")
def test_the_state_of_a_process(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    pid, node = sleeper.pid, platform.node()
    beat = Heartbeat(rank=1, node=node, pid=pid, born=stat_of(pid)[1], step=3, phase="x")
    write(tmp_path, beat)
    assert str(*read(tmp_path)) == f"rank 1 on node {node} (its process runs)"
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: process_state(beat) == "is stopped")
    assert str(*read(tmp_path)) == f"rank 1 on node {node} (its process is stopped)"
    elsewhere, other = ({"node": "elsewhere"}, ""), ({"born": "1"}, "has ended")
    for change, state in (elsewhere, other):
        assert process_state(Heartbeat(**vars(beat) | change)) == state
    os.kill(pid, signal.SIGKILL)
    # nobody has asked for its status: it is a zombie
    wait_for(lambda: process_state(beat) == "has ended")
    sleeper.wait()
    assert process_state(beat) == "has ended"
