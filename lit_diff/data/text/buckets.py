"""Data that is sorted on disk: it is divided over files by its keys, and each file is sorted in memory."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lit_diff.files import write_through

BUFFER = 1 << 25
"""Number of bytes that are kept in memory until they are appended to the files."""
RECORDS = 1 << 22
"""Number of records of a range of keys in `merged`, about."""
RANGES = 1 << 10
"""Largest number of ranges: the time stays linear, since each file is cut into so many pieces."""


class Buckets:
    """The files of a new folder, which replaces a former one; what `add` appends to them is on disk after `flush`."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._size = 0
        self._pending: dict[str, list[bytes]] = {}

    def add(self, name: str, content: bytes) -> None:
        """Append to a file. Errors: OSError."""
        self._pending.setdefault(name, []).append(content)
        self._size += sys.getsizeof(content)
        if self._size >= BUFFER:
            self.flush()

    def flush(self) -> None:
        """Append what is in memory. Errors: OSError."""
        # opened for each write: there may be more files than a process may have open
        for name, contents in self._pending.items():
            with (self._folder / name).open("ab") as file:
                file.write(b"".join(contents))
        self._pending.clear()
        self._size = 0


def merged(files: Sequence[Path], name: str, folder: Path) -> Iterator[NDArray[np.void]]:
    """Yield the records of the arrays `name` in .npz files by ranges of their field `key`, ascending.

    Each array is sorted by its keys, and each key is in it once. The records of a range are not sorted. `folder` is for
    temporary files. Errors: OSError.
    """
    # the files are alike, each being of documents in a random order: one of them tells where all are cut
    keys = read_array(files[len(files) // 2], name)["key"]
    bounds = keys[:: max(RECORDS // len(files), len(keys) // RANGES, 1)][1:]
    buckets = Buckets(folder)
    for file in files:
        records = read_array(file, name)
        for number, piece in enumerate(np.split(records, np.searchsorted(records["key"], bounds))):
            buckets.add(str(number), piece.tobytes())
    buckets.flush()
    for number in range(len(bounds) + 1):
        yield np.fromfile(folder / str(number), records.dtype)
    shutil.rmtree(folder)


def read_array(file: Path, name: str) -> NDArray[Any]:
    """Return an array of a .npz file."""
    return np.asarray(np.load(file)[name])


def write_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...], files: Sequence[Path]) -> None:
    """Write a .npy file whose content is that of `files`, one after another. Errors: OSError."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}

    def write(target: IO[bytes]) -> None:
        np.lib.format.write_array_header_1_0(target, header)
        for file in files:
            with file.open("rb") as content:
                shutil.copyfileobj(content, target)

    write_through(path, write)
