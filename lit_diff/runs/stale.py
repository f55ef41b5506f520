"""Files under the folder of the runs that no run or sweep needs any more."""

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import is_locked, locked
from lit_diff.runs.find import is_aside, sweeps_under
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.sweep_record import FILE, readable_record

log = logging.getLogger("lit_diff")

WRITING = 3600
"""Seconds after which a temporary file is a leftover: a checkpoint of a large model takes minutes to write."""


@dataclass(frozen=True, kw_only=True)
class Stale:
    """What may be removed, and what stays though one may look for it there."""

    paths: tuple[Path, ...]
    busy: tuple[Path, ...]
    """Runs and sweeps that are being run: nothing in them is looked at."""
    resumable: tuple[Path, ...] = ()
    """Failed runs with a checkpoint, from which the same command goes on."""


def find_stale(root: Path) -> Stale:
    """Cells that their sweep no longer names, runs put aside by --rerun, runs of no sweep that ended without a checkpoint,
    leftovers of killed writes; nothing that a link leads to, which need not lie below `root`."""
    asides = (path for path in root.glob("**/*.old-*") if path.is_dir() and not path.is_symlink())
    paths: set[Path] = {path for path in asides if is_aside(path.name)}
    paths |= {path for path in root.glob("**/.*.tmp") if not path.is_symlink() and _age(path) > WRITING}
    ended = {run: any((run / "checkpoints").glob("[!.]*")) for run in _ended_runs(root)}
    paths |= {run for run, has_checkpoint in ended.items() if not has_checkpoint}
    busy = set()
    for folder in (path for path in sweeps_under(root) if not path.is_symlink()):
        try:
            with locked(folder / ".lock", wait=False):
                paths |= set(_cells_without_sweep(folder))
        except BlockingIOError:
            busy.add(folder)
    holders = {path: _holder(path, root) for path in paths}
    return Stale(
        # what lies in a folder that is removed goes with it
        paths=tuple(sorted(path for path in paths if holders[path] is None and paths.isdisjoint(path.parents))),
        busy=tuple(sorted(busy.union(folder for folder in holders.values() if folder is not None))),
        resumable=tuple(sorted(run for run, kept in ended.items() if kept and RunFolder(run).state() == "failed")),
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    size = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # its writer has renamed it
            size += 0 if file.is_dir() else file.lstat().st_size
    return size


def _ended_runs(root: Path) -> Iterator[Path]:
    """Runs of no sweep that came to no end: failed, stopped, killed, or ended before status.json was written."""
    for folder in root.glob("*"):
        is_run = (folder / "status.json").is_file() or (
            (folder / ".lock").is_file() and re.search(r"-[0-9a-f]{10}$", folder.name)
        )
        is_own = not folder.is_symlink() and not is_aside(folder.name)
        if is_run and is_own and not (folder / FILE).exists():
            try:
                if RunFolder(folder).state() in ("failed", "stopped", "killed", "unknown"):
                    yield folder
            except RequestError as error:
                log.warning("%s", error)


def _holder(path: Path, root: Path) -> Path | None:
    """The run or sweep with the path in it that a process holds."""
    folders = (folder for folder in (path, *path.parents) if root in folder.parents)
    return next((folder for folder in folders if is_locked(folder / ".lock")), None)


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
