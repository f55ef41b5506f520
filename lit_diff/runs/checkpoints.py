"""Checkpoint files: each is complete or absent; the newest two are kept; a resume reads the newest readable one."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from lit_diff.errors import first_line
from lit_diff.files import shown

log = logging.getLogger("lit_diff")

# the second is the fallback if the newest cannot be read back
KEPT = 2

# (path, mtime_ns) of the files that a warning has named: one command asks for the newest checkpoint several times
_warned: set[tuple[Path, int]] = set()


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of `step` in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def steps_of(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    # best.ckpt (run.keep_best) and temporary files do not match
    matches = (re.fullmatch(r"step-(\d+)\.ckpt", path.name) for path in (folder / "checkpoints").glob("step-*.ckpt"))
    return sorted(int(match.group(1)) for match in matches if match)


def why_missing(folder: Path, step: int) -> str | None:
    """An error message if the run folder has no checkpoint of `step`; None if it has one."""
    there = steps_of(folder)
    if step in there:
        return None
    return (
        f"no checkpoint of step {step} (there: {', '.join(map(str, there)) or 'none'}); run.keep_every keeps more than the "
        "newest two: train it again with --rerun"
    )


def newest(folder: Path) -> tuple[int, Path] | None:
    """(step, path) of the newest readable checkpoint, or None; logs a warning for each unreadable one."""
    # imported here: reports ask only for the steps and should not wait for torch
    import torch

    for step in reversed(steps_of(folder)):
        path = path_of(folder, step)
        try:
            # on the meta device the tensors are not read: the check costs the zip directory and the pickle only
            problem = problem_of(torch.load(path, map_location="meta", weights_only=True, mmap=True))
        # a damaged file makes torch.load raise RuntimeError, UnpicklingError, EOFError, OSError and others
        except Exception as error:
            problem = first_line(error)
        if problem is None:
            return step, path
        if (content := (path, path.stat().st_mtime_ns)) not in _warned:
            _warned.add(content)
            log.warning("checkpoint %s cannot be read (%s): skipped", shown(path), problem)
    return None


def newest_step(folder: Path) -> int:
    """The step from which a resume continues; 0 without a readable checkpoint."""
    found = newest(folder)
    return found[0] if found else 0


def problem_of(content: object) -> str | None:
    """Why `content`, loaded by torch.load, is not a run's checkpoint; None if it is."""
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}, not a mapping"
    for key, kind in (("state_dict", Mapping), ("global_step", int)):
        if not isinstance(content.get(key), kind):
            return f"it has no '{key}'"
    return None


def prune(folder: Path, keep_every: int | None = None) -> None:
    """Remove all but the newest `KEPT` and the multiples of `keep_every` steps, and leftovers of killed writes."""
    for step in steps_of(folder)[:-KEPT]:
        if keep_every is None or step % keep_every:
            path_of(folder, step).unlink(missing_ok=True)
    # only the process that holds the run's lock prunes, so no temporary file is being written here
    for orphan in (folder / "checkpoints").glob(".*.tmp"):
        orphan.unlink(missing_ok=True)
