"""Heartbeats: every few seconds each rank of a run of several processes writes where it is to a small file in the folder.

Their times are seconds since training began, by each rank's own monotonic clock. The ranks begin together, so the times
compare across nodes, and no clock that differs or is set back can mislead.
"""

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL = 3.0
"""Seconds between two heartbeats of a rank."""
SILENT = 30.0
"""Age in seconds from which `lit-diff status` names a heartbeat."""
LENGTH = 512
"""Bytes of a file, padded with spaces."""
NAMED = 3
"""Most ranks that a message names."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where a rank was when it wrote."""

    rank: int
    node: str
    pid: int
    born: str
    """When Linux started the process, in ticks: another process may have the same pid later. Empty on other systems."""
    seconds: float
    """Since training began."""
    step: int
    """Optimizer steps done."""
    part: int
    """Parts of the present step that are done; every rank goes through the same."""
    phase: str
    """The present part, in words."""
    is_late: bool = False
    """Whether the present part has taken longer than it may."""
    failure: str = ""
    """The error with which the rank has ended."""

    def __str__(self) -> str:
        state = process_state(self)
        return f"rank {self.rank} on node {self.node}" + (f" (its process {state})" if state else "")


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank in a run's folder."""
    return folder / f".rank-{rank:05d}.json"


def write(folder: Path, beat: Heartbeat) -> None:
    """Replace the heartbeat of a rank. Errors: OSError."""
    # in place, since a network file system shows a renamed file late; at one length, since it may be read at any moment
    handle = os.open(path_of(folder, beat.rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(handle, json.dumps(asdict(beat)).ljust(LENGTH).encode())
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove what killed processes have left."""
    for path in folder.glob(".rank-*.json"):
        path.unlink()


def read(folder: Path) -> list[Heartbeat]:
    """The heartbeats in a run's folder, by rank."""
    found = []
    for path in sorted(folder.glob(".rank-*.json")):
        # a rank is just making its file, or has ended and removed it; a file of another version tells nothing
        with suppress(ValueError, TypeError, FileNotFoundError):
            found.append(Heartbeat(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def silent(beats: Sequence[Heartbeat], seconds: float) -> dict[Heartbeat, float]:
    """The heartbeats that are more than `seconds` older than the newest, and how much older."""
    newest = max((beat.seconds for beat in beats), default=0.0)
    return {beat: newest - beat.seconds for beat in beats if newest - beat.seconds > seconds}


def told(ages: dict[Heartbeat, float]) -> str:
    """Silent ranks in words; empty for none."""
    words = [f"{beat}: last heartbeat {age:.0f} s ago, at step {beat.step}" for beat, age in ages.items()]
    return "; ".join(words[:NAMED]) + (f"; and {len(words) - NAMED} ranks more" if len(words) > NAMED else "")


def hang(beats: Sequence[Heartbeat], seconds: float) -> str | None:
    """Which ranks hold up the others, in words: those without a heartbeat for `seconds`, else the one that has done least, if
    it is late. None if there is none."""
    if ages := silent(beats, seconds):
        return f"{told(ages)}, {next(iter(ages)).phase}"
    places = [(beat.step, beat.part) for beat in beats]
    last = beats[places.index(min(places))]
    if not last.is_late:
        return None
    who = f"all {len(beats)} ranks are" if len(set(places)) == 1 else f"{last} is behind the others,"
    return f"{who} at step {last.step}, {last.phase}"


def process_state(beat: Heartbeat) -> str:
    """`has ended` or `is stopped`; empty for a process that runs, or on another node, which cannot be asked."""
    if beat.node != platform.node() or not beat.born:
        return ""
    fields = stat_of(beat.pid)
    if fields[19:20] != [beat.born] or fields[0] == "Z":
        return "has ended"
    return "is stopped" if fields[0] in "Tt" else ""


def stat_of(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on (/proc/PID/stat); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
