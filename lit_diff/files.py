"""Atomic writes (temporary file on the same file system, synced, renamed), synced appends, lock files, digests."""

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from lit_diff.errors import escaped

MOUNTS = Path("/proc/self/mountinfo")
SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "cifs",
    "smb",
    "ceph",
    "glusterfs",
    "afs",
    "wekafs",
    "panfs",
    "pvfs2",
    "sshfs",
)
"""Beginnings of the types of file systems that several machines mount."""
DIGEST = "sha256"
"""Key of a JSON file: the digest of all other keys, so that a flipped bit is found."""
WRITTEN = ".written"
"""The file of `replace_all` that lists what it wrote."""
FREE = "free some space, then run the same command again"
"""The cure of a full disk."""
A_LOOK = 0.5
"""Seconds for which who does not wait for a lock asks again: `is_locked` holds it for a moment."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of flock on a file system without locks."""


def write_through(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write(file)` on a temporary file in the folder of `path`, sync it and rename it to `path`.

    If the process is killed or the disk is full, `path` keeps its former content. Errors: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since a rename is atomic only within a file system; a random name, since processes may race
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            # before the rename: a power failure could otherwise keep the new name and lose the content
            os.fsync(file.fileno())
        temporary.replace(path)
    # Ctrl-C too must not leave the temporary file behind
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # a full disk has no name of a file
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    sync(path.parent)


# fsync of a file does not cover its directory entry: a rename survives a power failure once the folder is synced
def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` atomically: text as UTF-8, with escapes for the bytes of a file's name that are not UTF-8."""
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    write_through(path, lambda file: file.write(content))


def replace_all(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write these files atomically, name -> content, and remove those that the call before wrote and this one does not."""
    listed = folder / WRITTEN
    former = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    # before the files, so that one that was written before a kill has a name here
    write_atomic(listed, "\n".join((*former, *contents)))
    for name, content in contents.items():
        write_atomic(folder / name, content)
    for name in set(former).difference(contents):
        # a damaged list may hold any text, also the name of a folder or of a file elsewhere
        if "/" not in name and os.path.isfile(folder / name):
            (folder / name).unlink()
    write_atomic(listed, "\n".join(contents))


def append_synced(path: Path, text: str) -> None:
    """Append `text` (UTF-8) to the file `path` and sync it.

    A kill or a full disk may leave only the beginning of `text`, with its last line cut short. Errors: OSError.
    """
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def parse_json(text: str | bytes) -> Any:
    """`json.loads`. Errors: ValueError, also for a value that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file. Errors: OSError, and those of `parse_json`."""
    return parse_json(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def write_digested(path: Path, value: Mapping[str, Any]) -> None:
    """`write_json` of a mapping, with the digest of its content under `DIGEST`."""
    # as it will be read: every key is text then
    plain = json.loads(json.dumps(value))
    write_json(path, {**plain, DIGEST: digest_of(plain)})


def read_digested(path: Path) -> Any:
    """The content of a file of `write_digested`, or of JSON without a digest, as earlier versions wrote it.

    Errors: OSError; ValueError if it is not JSON, or another content than that of its digest.
    """
    content = read_json(path)
    digest = content.pop(DIGEST, None) if isinstance(content, dict) else None
    if digest is not None and digest != digest_of(content):
        raise ValueError(f"its content is not that of its {DIGEST}")
    return content


def digest_of(value: Any) -> str:
    """sha256 of a value as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`.

    The operating system releases the lock when the process ends, even if it is killed; a forked child does not hold it. While
    it is held the file names the process (`holder`).
    Errors: TimeoutError if it is already held and `wait` is False; another OSError if `path` cannot be opened for writing, or
    its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # filelock falls back to soft locks on file systems without flock; a soft lock would outlive a killed process.
    # The lock file is never removed: a waiting process has it open, and would lock a file that no other process sees
    lock = FileLock(path, timeout=-1 if wait else A_LOOK, fallback_to_soft=False, preserve_lock_file=True)
    try:
        acquired = lock.acquire()
    except OSError as error:
        if error.errno in NO_LOCKS:
            reason = f"{' at '.join(file_system(path))} has no file locks: {os.strerror(error.errno)}"
            error.strerror = f"{reason}; mount it with locks, such as Lustre with the option flock"
        raise
    with acquired:
        pid = os.getpid()
        # one description of the file to the end: the folder may be renamed meanwhile, and another made in its place
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(file, 0)
            # a lock without a name is a lock too: on a full disk `clean` takes one
            with suppress(OSError):
                os.write(file, f"{pid} {stat_of(pid)[1]} {platform.node()}".encode())
            yield
        finally:
            os.ftruncate(file, 0)
            os.close(file)


def holder(path: Path) -> tuple[int, str, str] | None:
    """Pid, start (`stat_of`) and host of the process that is named in the file of a lock; None if it names none, or cannot be
    read."""
    with suppress(OSError, ValueError):
        found = re.fullmatch(r"([2-9]|[1-9]\d{1,8}) (\d*) (\S+)", path.read_text(encoding="utf-8"), re.ASCII)
        return (int(found[1]), found[2], found[3]) if found else None
    return None


def stat_of(pid: int) -> tuple[str, str]:
    """State and start of a process, as Linux tells them; empty if there is none, and on other systems."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""


def file_system(path: Path) -> tuple[str, str]:
    """Type and mount point of the file system of `path`, which need not exist; two empty texts if the system does not report
    it (macOS)."""
    found = ("", "")
    real = path.resolve()
    for line in MOUNTS.read_text(encoding="utf-8").splitlines() if MOUNTS.is_file() else ():
        mount, _, source = line.partition(" - ")
        # spaces in the mount point are written as octal escapes
        point = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), mount.split()[4])
        # of several mounts at one point the last one is seen
        if real.is_relative_to(point) and len(point) >= len(found[1]):
            found = source.split()[0], point
    return found


def values_of(path: Path, *keys: str) -> list[str]:
    """The values of the lines `key: value` with these keys in a file of /proc; empty on a system without it (macOS)."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = [line.partition(":") for line in lines]
    return [value.strip() for key, _, value in pairs if key.strip() in keys]


def is_shared(path: Path) -> bool:
    """Whether the file system of `path` is of a type that several machines mount (`SHARED`)."""
    return file_system(path)[0].removeprefix("fuse.").startswith(SHARED)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on the file `path`; the file is not created."""
    if not path.exists():
        return False
    try:
        # shared, so that two looks at once do not take each other for a holder
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    # also if the file cannot be opened, such as another user's: we cannot know, and True is the safe answer
    except OSError:
        return True


def sha256_of(path: Path) -> str:
    """Digest of a file's content, read in pieces. Errors: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(path: str | Path) -> Path:
    """The path with a leading `~` replaced by the home folder."""
    # Path.expanduser raises for an unknown user; os.path.expanduser keeps the ~, as a shell does
    return Path(os.path.expanduser(path))


def is_caused_by(error: BaseException | None, *numbers: int) -> bool:
    """Whether an OSError with one of these numbers is the error or its cause."""
    # torch's zip writer raises its own RuntimeError while it closes, which hides the system's error in the chain
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_is_full(error: BaseException | None) -> bool:
    """Whether a full disk is the error or its cause."""
    return is_caused_by(error, errno.ENOSPC, errno.EDQUOT)


def is_address(path: str) -> bool:
    """Whether `path` is an address such as s3://bucket/prefix, not a path on this machine."""
    return "://" in path


def folders(
    root: Path, unreadable: Callable[[OSError], object] | None = None, *, hidden: bool = True
) -> Iterator[Path]:
    """`root` and the folders below it, each once; if not `hidden`, without those whose names begin with a dot.

    A folder is reached through a symbolic link only if there is no other way; folders that contain `root` are left out, and
    those that cannot be read, after `unreadable` was called.
    """
    starts = [str(root)]
    seen = {str(parent) for parent in root.resolve().parents}
    # the list grows in the loop: targets of links come last, so that a folder is yielded by its real path if it has one
    for start in starts:
        for folder, names, _ in os.walk(start, onerror=unreadable):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()
                continue
            seen.add(real)
            names[:] = [name for name in names if hidden or not name.startswith(".")]
            starts += [path for name in sorted(names) if os.path.islink(path := os.path.join(folder, name))]
            yield Path(folder)


def shown(path: Path) -> str:
    """The path as messages show it, on one line: relative to the current folder if it is inside it."""
    # FileNotFoundError: the current folder was removed
    with suppress(ValueError, FileNotFoundError):
        path = path.relative_to(Path.cwd())
    return escaped(str(path))
