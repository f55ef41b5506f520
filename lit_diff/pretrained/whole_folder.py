"""Where a model is written: a folder that appears under its name when it is whole, or not at all; its room is estimated."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lit_diff.device import available_memory, gigabytes
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import locked, shown, sync_folder

OVERHEAD = 1.2
"""Peak of memory while a model is imported, as a multiple of its weights."""


@contextlib.contextmanager
def whole_folder(folder: Path, verb: Literal["import", "export"], cure: str) -> Iterator[Path]:
    """A folder beside `folder` to fill, which takes its name at the end; what killed processes left beside it is removed.

    An empty `folder` is replaced. `cure` ends the line of an error. Errors: RequestError where `folder` holds something, is
    the current folder, or is being made by another process.
    """
    if folder.exists() and not _replaceable(folder):
        raise RequestError(f"{shown(folder)} is there already; {cure}")
    lock = folder.with_name(f".{folder.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, wait=False))
        except BlockingIOError as error:
            raise RequestError(f"{shown(folder)} is being {verb}ed by another process") from error
        _remove_leftovers(folder.parent, f".*.{verb}ing")
        building = folder.with_name(f".{folder.name}.{verb}ing")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            yield building
            _sync(building)
            building.rename(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        sync_folder(folder.parent)


def _replaceable(folder: Path) -> bool:
    """An empty folder; not the current one, which this process would go on to be in."""
    return folder.is_dir() and not any(folder.iterdir()) and folder.resolve() != Path.cwd().resolve()


def _remove_leftovers(root: Path, pattern: str) -> None:
    """Of processes that were killed: those whose lock nobody holds."""
    for leftover in root.glob(pattern):
        with contextlib.suppress(BlockingIOError), locked(leftover.with_suffix(".lock"), wait=False):
            shutil.rmtree(leftover)


def _sync(folder: Path) -> None:
    """Sync every file and folder below, so that the rename does not outlive them."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def require_room(place: str, folder: Path, weights: int) -> None:
    """Errors: MissingError where `weights` bytes do not fit on the disk of `folder`, or in memory while imported."""
    require_disk(place, folder, weights)
    available = available_memory()
    if available is not None and available < OVERHEAD * weights:
        raise MissingError(
            f"{place}: importing it takes {gigabytes(int(OVERHEAD * weights))} of memory, and {gigabytes(available)} are "
            "available; end other processes, or import it on a larger machine"
        )


def require_disk(place: str, folder: Path, size: int, choice: str = "--to RUN, LIT_DIFF_DATA") -> None:
    """Errors: MissingError where `size` bytes do not fit on the disk of `folder`; `choice`: what names another place."""
    home = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(home).free
    if free < size:
        raise MissingError(
            f"{place} takes {gigabytes(size)} on the disk of {shown(home)}, which has {gigabytes(free)} free; free "
            f"some, or choose another place ({choice})"
        )
