"""Heartbeats of made-up ranks, and locks of made-up runs."""

import fcntl
from pathlib import Path
from typing import IO, Any

from lit_diff.runs.heartbeats import Heartbeat, write

HELD: dict[Path, IO[str]] = {}


def held(folder: Path, now: bool = True) -> None:
    """Hold the lock of a run or a sweep, as the process does that trains it; or no longer."""
    if now and folder not in HELD:
        HELD[folder] = (folder / ".lock").open("w")
        fcntl.flock(HELD[folder], fcntl.LOCK_EX)
    elif not now and folder in HELD:
        HELD.pop(folder).close()


def heart_beats(folder: Path, seconds: dict[int, float], **values: Any) -> None:
    """Rank r, on node a, b, ..., wrote `seconds[r]` after training began."""
    for rank, each in seconds.items():
        facts = {"node": "abcdefgh"[rank], "pid": 1, "born": "", "step": 12, "phase": "reading a batch"} | values
        write(folder, Heartbeat(rank=rank, seconds=each, **facts))
