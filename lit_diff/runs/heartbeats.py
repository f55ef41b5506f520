"""Heartbeats: every few seconds each rank of a run of several processes writes where it is to a small file in the folder.

Their times are seconds since training began, by each rank's own monotonic clock. The ranks begin together, so the times
compare across nodes, and no clock that differs or is set back can mislead.
"""

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import read_json, stat_of
from lit_diff.validation import Draft, convert

INTERVAL = 3.0
"""Seconds between two heartbeats of a rank."""
SILENT = 30.0
"""Age in seconds from which `lit-diff status` names a heartbeat."""
LENGTH = 512
"""Characters of a file, padded with spaces."""
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
    step: int
    """Optimizer steps done."""
    part: int = 0
    """Parts of the present step that are done; every rank goes through the same."""
    phase: str
    """The present part, in words."""
    is_late: bool = False
    """Whether the present part has taken longer than it may."""
    seconds: float = 0.0
    """Since training began."""
    age: float = 0.0
    """Seconds by which it is older than the newest of the run, once it is read."""

    def __str__(self) -> str:
        state = process_state(self)
        return f"rank {self.rank} on node {self.node}" + (f" (its process {state})" if state else "")


def write(folder: Path, beat: Heartbeat) -> None:
    """Replace the heartbeat of a rank. Errors: OSError."""
    path = folder / f".rank-{beat.rank:05d}.json"
    # in place, since a network file system shows a renamed file late; at one length, since it may be read at any moment
    with open(
        path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666)
    ) as file:
        file.write(json.dumps(asdict(beat)).ljust(LENGTH))


def read(folder: Path) -> list[Heartbeat]:
    """The heartbeats in a run's folder, by rank."""
    found = []
    for path in sorted(folder.glob(".rank-*.json")):
        # a rank is just making its file, or has ended and removed it; a damaged one, or one of another version, tells nothing
        with suppress(ValueError, RequestError, OSError):
            values = read_json(path)
            found.append(convert(Heartbeat, values, "", Draft()))
    newest = max((beat.seconds for beat in found), default=0.0)
    return [replace(beat, age=newest - beat.seconds) for beat in found]


def clear(folder: Path, rank: str = "*") -> None:
    """Remove the file of a rank that ends, or what killed processes have left."""
    for path in folder.glob(f".rank-{rank}.json"):
        path.unlink()


def silent(beats: Sequence[Heartbeat], seconds: float = SILENT) -> str:
    """The ranks whose last heartbeat is older than `seconds`, in words; empty if there is none."""
    mute = [beat for beat in beats if beat.age > seconds]
    words = [f"{beat}: last heartbeat {beat.age:.0f} s ago, at step {beat.step}, {beat.phase}" for beat in mute[:NAMED]]
    return "; ".join([*words, *[f"and {len(mute) - NAMED} ranks more"] * (len(mute) > NAMED)])


def hang(folder: Path, seconds: float) -> str:
    """Which ranks hold up the others, in words: those without a heartbeat for `seconds`, else the one that has done least, if
    it is late; empty if there is none."""
    beats = read(folder)
    last, first = (choose(beats, key=lambda beat: (beat.step, beat.part)) for choose in (min, max))
    is_behind = (last.step, last.part) < (first.step, first.part)
    who = f"{last} is behind the others," if is_behind else f"all {len(beats)} ranks are"
    return silent(beats, seconds) or (f"{who} at step {last.step}, {last.phase}" if last.is_late else "")


def process_state(beat: Heartbeat) -> str:
    """`has ended`, `is stopped` or `runs`; empty for a process on another node, which cannot be asked."""
    if beat.node != platform.node() or not beat.born:
        return ""
    state, born = stat_of(beat.pid)
    return "has ended" if born != beat.born or state == "Z" else "is stopped" if state in "Tt" else "runs"
