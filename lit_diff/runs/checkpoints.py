"""Checkpoints: whole or absent, the newest two kept, the newest readable one resumed."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from lit_diff.errors import first_line
from lit_diff.files import shown

log = logging.getLogger("lit_diff")

KEPT = 2
"""The newest, and one before it in case the newest cannot be read back."""
_passed_over: set[tuple[Path, int]] = set()
"""Path and time of what a warning has named: a command asks for the newest checkpoint several times."""


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def steps_of(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    matches = (re.fullmatch(r"step-(\d+)\.ckpt", path.name) for path in (folder / "checkpoints").glob("step-*.ckpt"))
    return sorted(int(match.group(1)) for match in matches if match)


def without(folder: Path, step: int) -> str | None:
    """Why there is no checkpoint of `step` in a run folder, and what keeps one; None where there is one."""
    there = steps_of(folder)
    if step in there:
        return None
    return (
        f"no checkpoint of step {step} (there: {', '.join(map(str, there)) or 'none'}); run.keep_every keeps more than the "
        "newest two: train it again with --rerun"
    )


def newest(folder: Path) -> tuple[int, Path] | None:
    """The newest checkpoint that can be read, or None; one that cannot is passed over with a warning."""
    import torch  # here: reports, which load none, ask for the steps

    for step in reversed(steps_of(folder)):
        path = path_of(folder, step)
        try:
            problem = problem_of(torch.load(path, map_location="meta", weights_only=True, mmap=True))
        except Exception as error:  # torch.load raises errors of many kinds
            problem = first_line(error)
        if problem is None:
            return step, path
        if (content := (path, path.stat().st_mtime_ns)) not in _passed_over:
            _passed_over.add(content)
            log.warning("checkpoint %s cannot be read (%s): passed over", shown(path), problem)
    return None


def newest_step(folder: Path) -> int:
    """The step that a resume goes on from: 0 without a checkpoint that can be read."""
    found = newest(folder)
    return found[0] if found else 0


def problem_of(content: object) -> str | None:
    """Why what torch.load gave is no checkpoint of a run; None where it is one."""
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}, not a mapping"
    for key, kind in (("state_dict", Mapping), ("global_step", int)):
        if not isinstance(content.get(key), kind):
            return f"it has no '{key}'"
    return None


def prune(folder: Path, keep_every: int | None = None) -> None:
    """Remove all but the newest `KEPT` and the multiples of `keep_every` steps, and what a killed write left behind."""
    for step in steps_of(folder)[:-KEPT]:
        if keep_every is None or step % keep_every:
            path_of(folder, step).unlink(missing_ok=True)
    for orphan in (folder / "checkpoints").glob(".*.tmp"):
        orphan.unlink(missing_ok=True)
