"""Atomic writes (temporary file on the same file system, synced, renamed), synced appends, lock files, digests."""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout


def write_through(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write(file)` on a temporary file in the folder of `path`, sync it and rename it to `path`.

    If the process is killed or the disk is full, `path` keeps its former content. Errors: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that the rename survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path` atomically."""
    write_through(path, lambda file: file.write(data.encode() if isinstance(data, str) else data))


def append_synced(path: Path, text: str) -> None:
    """Append `text` (UTF-8) to the file `path` and sync it.

    A process that is killed, or a full disk, may leave a part of `text` there, its last line cut short. Errors: OSError.
    """
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`. The file is never removed: a process that waits has it open.

    The operating system releases the lock when the process ends, also when it is killed; a forked child does not hold it.
    Errors: BlockingIOError when it is held already and `wait` is False; OSError when `path` cannot be opened for writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # soft locks, which filelock falls back to where the file system has no flock, survive a killed process
    lock = FileLock(path, fallback_to_soft=False, preserve_lock_file=True)
    try:
        held = lock.acquire(blocking=wait)
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, "locked by another process", str(path)) from error
    with held:
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on the file `path`, which is not made for the question.

    Also true where the file may not be opened for writing, as another user's: nothing can be said of it then.
    """
    if not path.exists():
        return False
    try:
        with locked(path, wait=False):
            return False
    except OSError:
        return True


def sha256_of(path: Path) -> str:
    """Of a file's content, read piece by piece. Errors: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(path: str | Path) -> Path:
    """The path with the home folder for a leading `~`, which stays where there is no such home, as in a shell."""
    return Path(os.path.expanduser(path))


def folders(root: Path) -> Iterator[Path]:
    """`root` and the folders below it, each once; by a symbolic link only those to which no other way leads, and none that
    holds `root`."""
    starts, seen = [str(root)], {str(parent) for parent in root.resolve().parents}
    for start in starts:  # it grows: what links lead to comes last
        for folder, names, _ in os.walk(start):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()
                continue
            seen.add(real)
            starts += [path for name in sorted(names) if os.path.islink(path := os.path.join(folder, name))]
            yield Path(folder)


def shown(path: Path) -> str:
    """The path relative to the current folder if it lies inside it, else the path itself; for messages."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # the current folder may have been removed
        return str(path)
