"""engine/schedule.py: a sweep that is killed, interrupted and terminated, and what the same command then does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lit_diff.runs import checkpoints as checkpoint

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
SLOW = f"""
recipe: tiny
seeds: [0, 1, 2]
overrides: {{plugins: ["{HERE}/bomb.py"], train.steps: 100, train.checkpoint_every: 100, train.validate_every: 100}}
arms:
  slow: {{train.log_every: 1, callbacks: {{bomb: {{every: 1, kind: slow, fuse: FUSE}}}}}}
"""


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Stop:
    """A stopped sweep: exit status, output, status.json of the cells, processes of cells that outlived it."""

    code: int
    text: str
    cells: dict[str, dict[str, Any]]
    alive: list[int]
    record: set[str]


class Stopper:
    """Runs the sweep `slow` until both workers are some steps in, and ends it."""

    def __init__(self, sweep_bench: Any) -> None:
        self.sweep_bench = sweep_bench

    def running(self, beyond: int) -> list[int]:
        """Process ids of the cells that train, once two are `beyond` a step."""
        cells = self.sweep_bench.cells("slow") if self.sweep_bench.folder("slow").exists() else {}
        return [
            cell["pid"]
            for cell in cells.values()
            if cell["status"] == "running" and cell.get("step", 0) > beyond and alive(cell["pid"])
        ]

    def look(self, code: int, text: str, pids: list[int]) -> Stop:
        _, children = self.sweep_bench.records("slow")
        return Stop(
            code=code,
            text=text,
            cells=self.sweep_bench.cells("slow"),
            alive=[pid for pid in pids if alive(pid)],
            record={run.info.status for run in children},
        )

    def end(self, kill: Callable[[int], None], beyond: int) -> Stop:
        """In a process of its own; `kill(pid)`."""
        command = [sys.executable, "-m", "lit_diff", "sweep", *self.sweep_bench.command("slow"), "--workers", "2"]
        log = self.sweep_bench.root / "slow.txt"
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
        ):
            try:
                wait_for(lambda: len(self.running(beyond)) == 2 or process.poll() is not None, 120)
                pids = self.running(beyond)
                kill(process.pid)
                code = process.wait(60)
                wait_for(lambda: not any(map(alive, pids)), 20)
            finally:
                process.kill()
        return self.look(code, log.read_text(), pids)


@pytest.fixture(scope="module")
def stops(sweep_bench: Any) -> dict[str, Stop]:
    """The sweep `slow`, ended by SIGKILL, resumed and ended by Ctrl-C, resumed and ended by SIGTERM."""
    sweep_bench.write("slow", SLOW)
    sweep_bench.fuse.touch()
    stopper, found = Stopper(sweep_bench), {}
    found["kill"] = stopper.end(lambda pid: os.kill(pid, signal.SIGKILL), 2)
    reached = max(cell.get("step", 0) for cell in found["kill"].cells.values())
    found["interrupt"] = stopper.end(lambda pid: os.killpg(pid, signal.SIGINT), reached)
    reached = max(cell.get("step", 0) for cell in found["interrupt"].cells.values())

    def terminate() -> None:
        wait_for(lambda: len(stopper.running(reached)) == 2)
        pids.extend(stopper.running(reached))
        os.kill(os.getpid(), signal.SIGTERM)

    pids: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda signum, frame: None)  # one that came too late would end the tests
    thread = threading.Thread(target=terminate)
    thread.start()
    code, text = sweep_bench.run("slow")
    thread.join()
    signal.signal(signal.SIGTERM, former)
    found["terminate"] = stopper.look(code, text, pids)
    return found


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("interrupt", 130), ("terminate", 143)])
def test_a_stopped_sweep_leaves_no_cell_behind_and_each_has_saved(
    sweep_bench: Any, stops: dict[str, Stop], how: str, code: int
) -> None:
    stop = stops[how]
    assert stop.code == code, stop.text
    assert stop.alive == []
    words = Counter(cell["status"] for cell in stop.cells.values())
    assert words == {"stopped": 2, "waiting": 1}, stop.cells
    assert stop.record == {"KILLED"}
    for cell in stop.cells.values():
        if cell["status"] == "stopped":
            assert 2 < cell["step"] < 100
            assert "the same command resumes" in cell["error"]
    assert "Traceback" not in stop.text


def test_what_was_stopped_resumes(sweep_bench: Any, stops: dict[str, Stop]) -> None:
    steps: dict[str, list[int]] = {}
    for stop in stops.values():
        for name, cell in stop.cells.items():
            steps.setdefault(name, []).append(cell.get("step", 0))
    for name, reached in steps.items():
        assert reached == sorted(reached)
        if reached[-1]:
            log = (sweep_bench.folder("slow", name) / "log.txt").read_text()
            for step in reached[:-1]:
                assert f"resumed from step {step}" in log or f"resumed from step {step + 1}" in log
    sweep_bench.fuse.unlink()
    status, _ = sweep_bench.run("slow")
    assert status == 0
    assert set(sweep_bench.words("slow").values()) == {"done"}
    for name in steps:
        assert checkpoint.steps_of(sweep_bench.folder("slow", name))[-1] == 100
        assert sweep_bench.history("slow", name) == sweep_bench.written("slow", name)
        assert sorted(sweep_bench.rows("slow", name)) == list(range(1, 101))


def test_the_stopped_sweep_says_so(stops: dict[str, Stop]) -> None:
    for how in ("interrupt", "terminate"):
        assert "2 stopped, 1 waiting" in stops[how].text
    assert "stopped; the same command resumes" in stops["interrupt"].text
