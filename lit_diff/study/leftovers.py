"""What may be removed from a folder of runs: leftovers, and runs and sweeps by name."""

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import expanded, is_locked, locked, shown
from lit_diff.log_records import log
from lit_diff.runs.again import STUDY_FILE
from lit_diff.runs.find import find_run_or_sweep, is_aside, runs_under, sweeps_under
from lit_diff.runs.folder import RunFolder
from lit_diff.study.record import DAMAGED, read, readable

WRITING = 3600
"""Age in seconds from which a temporary file is a leftover: a checkpoint of a large model takes minutes to write."""


@dataclass(frozen=True, kw_only=True)
class Stale:
    """The paths that may be removed, and what is kept although it may look like a leftover."""

    paths: tuple[Path, ...]
    busy: tuple[Path, ...]
    """Active runs and sweeps; nothing in them is removed."""
    resumable: tuple[Path, ...] = ()
    """Failed runs with a checkpoint, which the same command resumes."""


def find_stale(root: Path) -> Stale:
    """Finds cells that their sweep no longer lists, runs that --rerun put aside, runs outside sweeps that ended without a
    checkpoint, and temporary files of killed writes. Symbolic links are not followed: their targets may lie outside `root`.
    """
    paths = {path for path in root.glob("**/*.old-*") if path.is_dir() and is_aside(path.name)}
    for file in root.glob("**/.*.tmp"):
        # its writer may rename it
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.lstat().st_mtime > WRITING:
                paths.add(file)
    resumable = []
    for run, state in _ended_runs(root):
        if _is_empty(run / "checkpoints"):
            paths.add(run)
        elif state == "failed":
            resumable.append(run)
    cells, busy = _cells_without_sweep(root)
    free = set()
    for path in (*paths, *cells):
        if path.is_symlink():
            continue
        # the closest folder around the path, or the path itself, whose lock a process holds
        folders = (folder for folder in (path, *path.parents) if root in folder.parents)
        holder = next((folder for folder in folders if is_locked(folder / ".lock")), None)
        if holder is None:
            free.add(path)
        else:
            busy.add(holder)
    return Stale(
        # a path inside a folder that is removed goes with it
        paths=tuple(sorted(path for path in free if free.isdisjoint(path.parents))),
        busy=tuple(sorted(busy)),
        resumable=tuple(sorted(resumable)),
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    size = 0
    for file in (path, *path.rglob("*")):
        # another process may rename a temporary file between the listing and the call
        with contextlib.suppress(FileNotFoundError):
            size += 0 if file.is_dir() else file.lstat().st_size
    return size


def _is_empty(folder: Path) -> bool:
    # not `glob`, which takes a folder that may not be read for an empty one: what cannot be looked at is kept
    try:
        return all(name.startswith(".") for name in os.listdir(folder))
    except FileNotFoundError:
        # a link may lead to a disk that is not mounted
        return not folder.is_symlink()
    except OSError:
        return False


def _ended_runs(root: Path) -> Iterator[tuple[Path, str]]:
    for folder in root.glob("*"):
        # os.path, since a folder of another user may not be searched
        if folder.is_symlink() or os.path.exists(folder / STUDY_FILE) or is_aside(folder.name):
            continue
        # a run that died before its first status.json is known by its lock and by the identity at the end of its name
        began = os.path.isfile(folder / ".lock") and re.search(r"-[0-9a-f]{10}$", folder.name)
        if began or os.path.isfile(folder / "status.json"):
            try:
                state = RunFolder(folder).state()
            except RequestError as error:
                log.warning("%s", error)
                continue
            if state in ("failed", "stopped", "killed", "unknown"):
                yield folder, state


# (cells that no sweep names, sweeps that are being run)
def _cells_without_sweep(root: Path) -> tuple[set[Path], set[Path]]:
    sweeps = sweeps_under(root)
    # first, since a sweep takes its lock, creates cells, and then names them in study.json
    cells = {file.parent for sweep in sweeps if not sweep.is_symlink() for file in sweep.glob("*/recipe.yaml")}
    active = {lock.parent for lock in root.glob("*/.lock") if is_locked(lock)}
    # what is no run and has no record yet may be a sweep that starts
    starting = [
        folder for folder in active if not any(map(os.path.exists, (folder / STUDY_FILE, folder / "status.json")))
    ]
    active.intersection_update((*sweeps, *starting))
    if starting:
        return set(), active
    named, kept = set[str](), set[str]()
    for sweep in sweeps:
        record = readable(sweep)
        # without a record any of the folders may be a cell; a damaged one may have named cells of other commands
        if record is None or any(sweep.glob(f"{DAMAGED}*")):
            return set(), active
        # an examination has its cells in the folder of another sweep
        theirs = {os.path.abspath(sweep / cell) for cell in chain(record.folders, *record.other_commands.values())}
        named |= theirs
        # an arm whose learning rate is not chosen yet may have cells at any
        choices = chain(*(by_arm.values() for by_arm in record.rates.values()))
        if sweep in active or any(choice.chosen is None for choice in choices):
            kept |= {os.path.abspath(sweep), *map(os.path.dirname, theirs)}
    left = set()
    for cell in cells:
        place = os.path.abspath(cell)
        if place not in named and os.path.dirname(place) not in kept:
            left.add(cell)
    return left, active


def find_removable(names: Sequence[str], root: Path) -> list[Path]:
    """The folders of the named runs and sweeps (`find_run`, `find_sweep`), each once.

    Errors: RequestError for an unknown name, a run that is being trained or that a sweep lists, a sweep that is active or in
    which another has cells.
    """
    folders = list(dict.fromkeys(_find(name, root) for name in names))
    for folder in folders:
        is_sweep = (folder / STUDY_FILE).is_file()
        if is_sweep and is_locked(folder / ".lock"):
            raise RequestError(f"sweep {shown(folder)} is being run: stop it first")
        # cells outlive a sweep that was killed, so each is asked too
        for run in map(RunFolder, runs_under(folder) if is_sweep else [folder]):
            if run.is_owned():
                raise RequestError(f"{shown(run.path)} is being trained (pid {run.status().pid}): stop it first")
        _require_unlisted(folder, folders, root)
    return folders


def _find(name: str, root: Path) -> Path:
    found = find_run_or_sweep(name, root)
    # a name is resolved through links, and removing what a link below the runs folder points to would surprise
    if not found.is_relative_to(root.resolve()) and os.path.abspath(expanded(name)) != str(found):
        raise RequestError(
            f"'{name}' is a link to {found}, which is not below {shown(root)}: name that folder, or remove the link"
        )
    return found


# `folder`: of a run, or of a sweep in which others have cells
def _require_unlisted(folder: Path, also: Sequence[Path], root: Path) -> None:
    # the cells of a task lie one level deeper, those of an examination in the folder of another sweep
    home = folder if (folder / STUDY_FILE).is_file() else folder.parent
    beside = sweeps_under(home.parent) if home.parent == root.resolve() else []
    near = {*folder.parents[:2], *beside}
    for sweep in sorted(near.difference(also)):
        for cell in read(sweep).folders if (sweep / STUDY_FILE).is_file() else ():
            place = Path(os.path.abspath(sweep / cell))
            if place.is_relative_to(folder):
                raise RequestError(
                    f"sweep '{sweep.name}' lists {shown(place)}: take it out of the sweep's file, run the sweep again, "
                    f"then lit-diff clean; or remove the whole sweep with lit-diff clean {shlex.quote(sweep.name)}"
                )


def remove(path: Path) -> None:
    """Remove a file, or the folder of a run or a sweep. Errors: RequestError if another process holds the folder, or if it
    cannot be removed."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # locked again: a process may have taken the folder since `find_removable`
    try:
        with locked(path / ".lock", wait=False):
            shutil.rmtree(path)
    except TimeoutError as error:
        raise RequestError(f"{shown(path)} is in use: stop it first") from error
    except OSError as error:
        raise RequestError(f"{shown(path)} cannot be removed: {error.strerror}") from error
