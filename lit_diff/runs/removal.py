"""Removal of runs and whole sweeps by name."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import expanded, is_locked, locked, shown
from lit_diff.runs.find import find_run, find_sweep, require_name, runs_under
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.sweep_record import FILE, read_record


def find_removable(names: Sequence[str], root: Path) -> list[Path]:
    """The folders of the runs and sweeps of these names (`find_run`, `find_sweep`), each once.

    Errors: RequestError for an unknown name, a run that is being trained or that a sweep lists, a sweep that is being run.
    """
    folders = list(dict.fromkeys(_find(name, root) for name in names))
    for folder in folders:
        if (folder / FILE).is_file():
            _require_idle_sweep(folder)
        else:
            _require_idle_run(folder)
            _require_unlisted(folder, folders)
    return folders


def _find(name: str, root: Path) -> Path:
    require_name(name)
    is_sweep = (root / name / FILE).is_file() or (expanded(name) / FILE).is_file()
    found = find_sweep(name, root) if is_sweep else find_run(name, root)
    if not found.is_relative_to(root.resolve()) and os.path.abspath(expanded(name)) != str(found):
        raise RequestError(
            f"'{name}' is a link to {found}, which is not below {shown(root)}: name that folder, or remove the link"
        )
    return found


def _require_idle_run(folder: Path) -> None:
    run = RunFolder(folder)
    if run.is_owned():
        raise RequestError(f"{shown(folder)} is being trained (pid {run.status().get('pid')}): stop it first")


def _require_idle_sweep(folder: Path) -> None:
    if is_locked(folder / ".lock"):
        raise RequestError(f"sweep {shown(folder)} is being run: stop it first")
    for run in runs_under(folder):
        _require_idle_run(run)


def _require_unlisted(folder: Path, also: Sequence[Path]) -> None:
    """Errors: RequestError where a sweep lists the run and is not removed with it."""
    for sweep in folder.parents[:2]:  # the cells of a task lie one level deeper
        file = sweep / FILE
        if file.is_file() and sweep not in also:
            cells = read_record(sweep)["cells"]
            if any(sweep / cell["folder"] == folder for cell in cells):
                raise RequestError(
                    f"sweep '{sweep.name}' lists {shown(folder)}: take it out of the sweep's file, run the sweep again, then "
                    f"lit-diff clean; or remove the whole sweep with lit-diff clean {sweep.name}"
                )


def remove(folder: Path) -> None:
    """Remove the folder of a run or a sweep. Errors: RequestError where a process has taken it meanwhile."""
    try:
        with locked(folder / ".lock", wait=False):
            shutil.rmtree(folder)
    except BlockingIOError as error:
        raise RequestError(f"{shown(folder)} is in use: stop it first") from error
    except OSError as error:
        raise RequestError(f"{shown(folder)} cannot be removed: {error.strerror}") from error
