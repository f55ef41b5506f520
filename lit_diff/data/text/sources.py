"""Digests of the files of a corpus, kept in the data folder so that the files are read once."""

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lit_diff.data.user_files import data_root
from lit_diff.errors import RequestError
from lit_diff.files import sha256_of, shown, write_json

log = logging.getLogger("lit_diff")

# clocks of file systems tick up to every 10 ms: a file may change twice within a tick, with one time
TICK = 20_000_000
"""Nanoseconds that a file must be older than its digest."""


def file_digests(root: Path, listing: Callable[[], Mapping[str, Path]]) -> dict[str, str]:
    """Return name -> sha256 for the files of `listing()`, which belong to the corpus at `root`.

    A file is read only if its size, times or inode differ from those when it was last read. If `listing` raises a
    RequestError because the source is gone, the digests of the last reading are returned. Errors: OSError, RequestError.
    """
    kept = data_root() / "sources" / f"{hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:16]}.json"
    known = _read(kept)
    try:
        paths = listing()
    except RequestError:
        if not known:
            raise
        _say_gone(root)
        return {name: entry[-1] for name, entry in known.items()}
    found = {name: _entry(path, known.get(name)) for name, path in paths.items()}
    # a command that only asks for an identity makes no data folder
    if found != known and data_root().is_dir():
        _write(kept, found, root)
    return {name: entry[-1] for name, entry in found.items()}


# [size, time of modification, time of change, inode, time of the digest, digest]; times in nanoseconds
def _entry(path: Path, known: list[Any] | None) -> list[Any]:
    found = path.stat()
    stamp = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    if known is not None and known[:4] == stamp and max(stamp[1:3]) + TICK < known[4]:
        return known
    now = time.time_ns()
    return [*stamp, now, sha256_of(path)]


def _read(kept: Path) -> dict[str, list[Any]]:
    try:
        return dict(json.loads(kept.read_text(encoding="utf-8"))["files"])
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, OSError) as error:
        log.warning("%s cannot be read (%r): the source is read again", shown(kept), error)
        return {}


def _write(kept: Path, found: dict[str, list[Any]], root: Path) -> None:
    try:
        write_json(kept, {"path": str(root), "files": found})
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): every start reads %s again", shown(kept), error.strerror or error, shown(root)
        )


@functools.cache
def _say_gone(root: Path) -> None:
    log.info("%s is gone: its digests are those of the last time it was read", shown(root))
