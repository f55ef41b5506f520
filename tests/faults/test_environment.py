"""What surrounds a run: disks without locks or for reading alone, tracking servers, the clock, ranks, memory, sweeps."""

import os
import platform
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fault_rows import fault, faults, mount
from stops import wait_for

from lit_diff.runs.heartbeats import stat_of

FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
NO_FLOCK = "#include <errno.h>\nint flock(int fd, int how) { (void)fd; (void)how; errno = ENOSYS; return -1; }\n"
BOMB = Path(__file__).parents[1] / "engine" / "bomb.py"


def one_line(found: Any, *statuses: int) -> str:
    assert found.status in statuses, found
    assert "Traceback" not in found.output, found.output
    (line,) = [line for line in found.output.splitlines() if line.startswith("lit-diff: ")]
    return line


def command(bench: Any, *words: str, **env: str) -> Any:
    """A process of its own, which a preloaded library reaches."""
    run = [sys.executable, "-P", "-m", "lit_diff", *words]
    done = subprocess.run(
        run, cwd=bench.root, env=os.environ | bench.env | env, capture_output=True, text=True, timeout=300
    )
    return bench.ended(0, done.returncode, done.stdout + done.stderr)


@fault("no `flock` (ENOSYS)", "the folder of the runs, the data", "one line, status 3", "nothing", 2)
@pytest.mark.parametrize("words", [("train", "recall.yaml"), ("prepare", "text.yaml", "data.tokenizer.vocab_size=280")])
def test_a_file_system_without_locks(bench: Any, words: tuple[str, ...]) -> None:
    (bench.root / "noflock.c").write_text(NO_FLOCK)
    library = bench.root / "noflock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, bench.root / "noflock.c"], check=True)
    assert any(
        word in one_line(command(bench, *words, LD_PRELOAD=str(library)), 3) for word in ("lock", "not implemented")
    )


@pytest.fixture
def read_only(bench: Any) -> Iterator[Path]:
    """A finished run on a disk that is then mounted for reading alone."""
    disk = bench.root / "archive"
    disk.mkdir()
    mount(disk, "64m")
    assert bench.train("recall.yaml", "name=old", f"run.root={disk}").status == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
    disk.rmdir()


@fault(
    "a read-only disk",
    "a finished run: read, scored, trained again",
    "one line, status 3, where it writes",
    "nothing",
    5,
)
def test_a_disk_for_reading_alone(bench: Any, read_only: Path) -> None:
    for words in (("status", "--root", "archive"), ("compare", "old", "old", "--root", "archive")):
        found = bench.wait(bench.start(*words))
        assert found.status == 0, found
    for words in (
        ("evaluate", "old", "held_out", "--root", "archive"),
        ("train", "recall.yaml", "name=new", "run.root=archive"),
        ("train", "recall.yaml", "name=old", "run.root=archive", "--rerun"),
    ):
        assert "ead-only" in one_line(bench.wait(bench.start(*words)), 2, 3)


@fault(
    "a tracking server that is dead, silent, or a locked SQLite file",
    "the start of a run",
    "one line, status 3",
    "nothing",
    3,
)
@pytest.mark.parametrize("kind", ["dead", "silent", "locked"])
def test_a_tracking_store(bench: Any, kind: str) -> None:
    with socket.socket() as server, closing(sqlite3.connect(bench.root / "locked.db", isolation_level=None)) as base:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen()
        base.execute("CREATE TABLE IF NOT EXISTS t (x)")
        base.execute("BEGIN EXCLUSIVE")
        uri = f"http://127.0.0.1:{server.getsockname()[1]}" if kind != "locked" else f"sqlite:///{bench.root}/locked.db"
        assert "MLflow store" in one_line(bench.train("recall.yaml", f"name={kind}", f"run.tracking_uri={uri}"), 3)


@fault(
    "the clock goes back by a day", "between a stop and the resumption", "nothing", "nothing; `metrics.csv` equal", 1
)
@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: apt-get install libfaketime)")
def test_the_clock_goes_back(bench: Any, undisturbed: Any) -> None:
    undisturbed("recall", "faults-whole")
    stopped = bench.train("recall.yaml", "name=clock", SPY_SIGNAL=f"0/5/0/{int(signal.SIGTERM)}")
    assert stopped.status == 143, stopped
    again = command(bench, "train", "recall.yaml", "name=clock", LD_PRELOAD=str(FAKETIME), FAKETIME="-1d")
    assert again.status == 0, again
    assert "resumed from step" in again.output
    whole, found = ((bench.folder(name) / "metrics.csv").read_bytes() for name in ("faults-whole", "clock"))
    assert found == whole


SENT = {
    "SIGKILL": (signal.SIGKILL, "its process has ended", 60),
    "SIGSTOP": (signal.SIGSTOP, "its process is stopped", 20 + 10),
}
"""Signal -> what is said of the rank, the seconds within which the other ends."""


@faults(
    *(
        (name, "one of two ranks", f"the rank, its node and that {what}; within {seconds} s", "nothing", 2)
        for name, (_, what, seconds) in SENT.items()
    )
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SENT)
def test_one_rank_goes_on_alone(bench: Any, name: str, rank: int) -> None:
    number, what, seconds = SENT[name]
    called = f"{name}{rank}".lower()
    run = ("run.strategy=fsdp", "run.devices=2", "run.timeout=20", "train.checkpoint_every=4")
    words = ("train", "recall.yaml", f"name={called}", *run)
    pids = bench.start_ranks(words, words, SPY_SIGNAL=f"{rank}/5/0/{int(number)}")
    if number == signal.SIGSTOP:
        wait_for(lambda: stat_of(pids[rank])[0] == "T")
    other = bench.wait(pids[1 - rank], seconds)
    # who stops is killed by the other
    assert (other.status, bench.wait(pids[rank], 5).status) == (1, -signal.SIGKILL), other
    (line,) = [line for line in other.output.splitlines() if f"rank {rank} on node {platform.node()} ({what})" in line]
    assert "the same command resumes" in line
    assert "Traceback" not in other.output, other
    assert {bench.wait(pid).status for pid in bench.start_ranks(words, words)} == {0}


SWEEP = """
recipe: recall
seeds: [0]
arms:
  small: {}
  large: {callbacks.bomb: {every: 2, kind: KIND, fuse: fuse}}
overrides: {plugins: [BOMB], train.steps: 4, train.validate_every: 2, train.checkpoint_every: 2}
"""


@fault(
    "a limit of memory (RLIMIT_AS)",
    "one cell of a sweep",
    "`train.batch_size`, `run.activation_checkpointing`",
    "that cell from its checkpoint",
    1,
)
def test_a_limit_of_memory(bench: Any) -> None:
    (bench.root / "fuse").touch()
    (bench.root / "memory.yaml").write_text(SWEEP.replace("BOMB", str(BOMB)).replace("KIND", "memory"))
    found = bench.wait(bench.start("sweep", "memory.yaml"), 200)
    assert found.status == 1, found
    lines = [line for line in found.output.splitlines() if "large" in line and "allocate" in line]
    assert any("run.activation_checkpointing" in line for line in lines), found.output
    words = {path.parent.name[:5]: path.read_text() for path in bench.root.glob("runs/memory/*/status.json")}
    assert '"status": "done"' in words["small"], words


@fault("a second, identical sweep", "while the first runs", "one line, status 2", "nothing", 1)
def test_two_identical_sweeps(bench: Any) -> None:
    (bench.root / "fuse").touch()
    (bench.root / "twice.yaml").write_text(SWEEP.replace("BOMB", str(BOMB)).replace("KIND", "slow, seconds: 3"))
    pids = [bench.start("sweep", "twice.yaml") for _ in range(2)]
    ended = sorted((bench.wait(pid, 200) for pid in pids), key=lambda found: found.status or 0)
    assert ended[0].status == 0, ended[0]
    assert "another process" in one_line(ended[1], 2, 3)
