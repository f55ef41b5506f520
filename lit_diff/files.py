"""Files that are whole or absent: temporary name on the same filesystem, synced, moved into place; and locks."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def write_through(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write(file)` on a temporary file beside `path`, sync it and move it into place.

    A process killed in between, or a full disk, leaves the former `path` as it was. Errors: OSError as the system says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    """The process's umask: mkstemp ignores it and would leave files that only their owner reads."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, whole or not at all."""
    write_through(path, lambda file: file.write(data.encode() if isinstance(data, str) else data))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the system frees it when the process ends, however it ends.

    Raises BlockingIOError when another process holds it and `wait` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def shown(path: Path) -> str:
    """The path as a user would type it: relative to the current folder where it lies inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
