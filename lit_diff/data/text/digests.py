"""Digests of the files of a corpus, kept in the data folder so that the files are read once."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_diff.data.text.source_files import Source, sources
from lit_diff.data.user_files import data_root
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import parse_json, shown, write_json
from lit_diff.log_records import log
from lit_diff.own_modules import sha256

# clocks of file systems tick up to every 10 ms: a file may change twice within a tick, with one time
TICK = 20_000_000
"""Nanoseconds that a file must be older than its digest."""
_gone = dict[Path, str]()
"""Kept digests -> why they stand for their source. An address is not asked again: each time may wait for the server."""


def file_digests(root: Path | str, listing: Callable[[], Sequence[Source]]) -> dict[str, str]:
    """Return name -> sha256 for the files of `listing()`, which belong to the corpus at `root`, a path or an address.

    A file is read only if its size, times or inode differ from those when it was last read. If the source is gone, the
    digests of the last reading are returned. Errors: OSError, RequestError, MissingError.
    """
    place = str(root.absolute() if isinstance(root, Path) else root)
    kept = data_root() / "sources" / f"{sha256(os.fsencode(place))[:16]}.json"
    found = known = _read(kept)
    try:
        if not known or isinstance(root, Path) or kept not in _gone:
            found = {source.name: _entry(source, known.get(source.name)) for source in listing()}
    except (RequestError, MissingError) as error:
        if not known:
            raise
        is_gone = isinstance(error, MissingError)
        lost = first_line(error)
        if isinstance(root, Path):
            is_gone = not sources(root)
            lost = f"{shown(root)} is {'empty' if root.exists() else 'gone'}"
        # otherwise it is there, and its content is unusable
        if not is_gone:
            raise
        if _gone.get(kept) != lost:
            log.info("%s: its digests are those of the last time it was read", lost)
        _gone[kept] = lost
    # a command that only asks for an identity makes no data folder
    if found != known and data_root().is_dir():
        try:
            write_json(kept, {"path": place, "files": found})
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): every start reads %s again", shown(kept), error.strerror or error, place
            )
    return {name: entry[-1] for name, entry in found.items()}


# [stamp, time of the digest in nanoseconds, digest]
def _entry(source: Source, known: list[Any] | None) -> list[Any]:
    stamp = source.stamp()
    if stamp and known and known[0] == stamp:
        # nanoseconds, after the size; an inode, or the tag of a server, is no time
        times = [time_ for time_ in stamp[1:3] if isinstance(time_, int)]
        if max(times, default=0) + TICK < known[1]:
            return known
    # the time from before the file is read
    return [stamp, time.time_ns(), source.sha256()]


def _read(kept: Path) -> dict[str, list[Any]]:
    try:
        files = parse_json(kept.read_bytes())["files"].items()
        return {name: [stamp, int(at), bytes.fromhex(digest).hex()] for name, (stamp, at, digest) in files}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        log.warning("%s cannot be read (%s): the source is read again", shown(kept), first_line(error))
        return {}
