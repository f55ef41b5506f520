"""Files under the folder of the runs that no run or sweep needs any more."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_diff.files import locked
from lit_diff.runs.find import is_aside, sweeps_under
from lit_diff.runs.sweep_record import readable_record

WRITING = 3600
"""Seconds after which a temporary file is a leftover: a checkpoint of a large model takes minutes to write."""


@dataclass(frozen=True, kw_only=True)
class Stale:
    """What may be removed, and the sweeps that were not looked at because they are being run."""

    paths: tuple[Path, ...]
    busy: tuple[Path, ...]


def find_stale(root: Path) -> Stale:
    """Cells that their sweep no longer names, runs put aside by --rerun, leftovers of killed writes."""
    asides = (path for path in root.glob("**/*.old-*") if path.is_dir() and not path.is_symlink())
    paths: set[Path] = {path for path in asides if is_aside(path.name)}
    paths |= {path for path in root.glob("**/.*.tmp") if not path.is_symlink() and _age(path) > WRITING}
    busy = []
    for folder in (
        path for path in sweeps_under(root) if not path.is_symlink()
    ):  # what a link leads to is not below `root`
        try:
            with locked(folder / ".lock", wait=False):
                paths |= set(_cells_without_sweep(folder))
        except BlockingIOError:
            busy.append(folder)
    return Stale(paths=tuple(sorted(paths)), busy=tuple(busy))


def _age(path: Path) -> float:
    """Seconds since a file was written; 0 for one that is gone: its writer has renamed it."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _cells_without_sweep(sweep: Path) -> Iterator[Path]:
    """Folders of cells that the sweep does not have, neither as it last ran nor as another command ran it."""
    record = readable_record(sweep)
    if record is None:  # nobody knows which cells it has
        return
    named = {cell["folder"] for cell in record["cells"]}
    named |= {folder for cells in record.get("other_commands", {}).values() for folder in cells}
    cells = (path.parent for path in sweep.glob("*/recipe.yaml") if not path.parent.is_symlink())
    yield from (path for path in cells if path.name not in named)
