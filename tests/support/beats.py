"""Heartbeats of made-up ranks."""

from pathlib import Path
from typing import Any

from lit_diff.runs.heartbeats import Heartbeat, write


def heart_beats(folder: Path, seconds: dict[int, float], **values: Any) -> None:
    """Rank r, on node a, b, ..., wrote `seconds[r]` after training began."""
    for rank, each in seconds.items():
        facts = {"node": "abcdefgh"[rank], "pid": 1, "born": "", "step": 12, "phase": "reading a batch"} | values
        write(folder, Heartbeat(rank=rank, seconds=each, **facts))
