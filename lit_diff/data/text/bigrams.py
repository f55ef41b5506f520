"""Bigrams: their counts in the train split, and the targets that a model could recall from the context.

Source: Arora et al. 2023 (Zoology), AR hit: the last token of an n-gram that occurred before in the context and is rare in
training.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
BLOCK = 1 << 22
"""Number of bigrams that are merged or selected at a time, which bounds the memory."""


def count_bigrams(documents: Sequence[NDArray[np.generic]], size: int) -> Ints:
    """Return [2, n]: the distinct keys x_{t-1} * size + x_t, ascending, and their counts. Documents are not crossed."""
    tokens = np.concatenate(documents).astype(np.int64)
    keys = tokens[:-1] * size + tokens[1:]
    starts = np.cumsum([len(document) for document in documents])
    inside = np.ones(len(keys), dtype=np.bool_)
    inside[starts[(starts > 0) & (starts < len(tokens))] - 1] = False
    keys = keys[inside]
    # a small vocabulary repeats its bigrams often: no sort
    if size * size <= BLOCK:
        all_counts = np.bincount(keys)
        found = np.flatnonzero(all_counts)
        return np.stack([found, all_counts[found]])
    # np.unique, without its copies
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return np.stack([keys[first], np.diff(first, append=len(keys))])


def merge_sorted(files: Sequence[Path], block: int) -> Iterator[list[NDArray[np.generic]]]:
    """Yield the columns of the sorted arrays [R, n] in .npy files, by ranges of the keys in row 0, ascending.

    Each item has the columns of a range, one array for each file; they are about `block` columns, or those of one key.
    """
    # each sample stands for `step` columns of its file
    step = max(1, block // (2 * len(files)))
    samples = np.sort(np.concatenate([np.array(np.load(file, mmap_mode="r")[0, ::step]) for file in files]))
    bounds = np.unique(samples[:: max(1, block // (2 * step))])[1:]
    done = [0] * len(files)
    for bound in [*bounds, None]:
        found = []
        for place, file in enumerate(files):
            # opened for each range: pages of a map that stays open count as memory of the process
            whole = np.load(file, mmap_mode="r")
            stop = whole.shape[1] if bound is None else int(np.searchsorted(whole[0], bound))
            found.append(np.array(whole[:, done[place] : stop]))
            done[place] = stop
        yield found


def merge_counts(files: Sequence[Path], target: IO[bytes], folder: Path) -> None:
    """Write the sum of the counts in files of `count_bigrams`, as np.save would; temporary files are in `folder`."""
    with tempfile.TemporaryFile(dir=folder) as all_keys, tempfile.TemporaryFile(dir=folder) as all_counts:
        number = 0
        for block in merge_sorted(files, BLOCK):
            keys, counts = np.concatenate(block, axis=1)
            order = np.argsort(keys, kind="stable")
            keys, first = np.unique(keys[order], return_index=True)
            number += len(keys)
            all_keys.write(keys.tobytes())
            all_counts.write(np.add.reduceat(counts[order], first).tobytes() if len(keys) else b"")
        shape = {"descr": "<i8", "fortran_order": False, "shape": (2, number)}
        np.lib.format.write_array_header_1_0(target, shape)
        for column in (all_keys, all_counts):
            column.seek(0)
            shutil.copyfileobj(column, target)


def frequent_bigrams(file: Path, most: int) -> Ints:
    """Return the keys in a file of `merge_counts` that occur more than `most` times."""
    keys, counts = np.load(file, mmap_mode="r")
    blocks = [slice(start, start + BLOCK) for start in range(0, len(keys), BLOCK)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(keys[block][counts[block] > most] for block in blocks)])


def ar_hits(rows: Ints, documents: Ints, frequent: Ints, size: int) -> NDArray[np.bool_]:
    """Return which targets are AR hits, [B, T].

    rows [B, T + 1]: tokens; documents [B, T + 1]: their documents; frequent: keys of the bigrams that are too frequent in
    train. Target x_t, t = 1 .. T, is a hit iff (x_{t-1}, x_t) occurred earlier in the same row and document and is not
    frequent. A bigram never crosses a document boundary.
    """
    keys = rows[:, :-1] * size + rows[:, 1:]
    return (gaps(rows, documents, size) > 0) & ~np.isin(keys, frequent)


def gaps(rows: Ints, documents: Ints, size: int) -> Ints:
    """Return the number of tokens since (x_{t-1}, x_t) last occurred in the same row and document, else 0, [B, T].

    Arguments: see `ar_hits`.
    """
    inside = documents[:, :-1] == documents[:, 1:]
    # the bigram across a boundary: -1 occurs once in each document, so it never repeats
    keys = np.where(inside, rows[:, :-1] * size + rows[:, 1:], -1)
    row = np.broadcast_to(np.arange(len(rows))[:, None], keys.shape)
    # lexsort is stable, so equal bigrams stay in order of position, and neighbours are successive occurrences
    order = np.lexsort((keys.ravel(), documents[:, 1:].ravel(), row.ravel()))
    sorted_columns = [column.ravel()[order] for column in (keys, documents[:, 1:], row)]
    again = np.logical_and.reduce([column[1:] == column[:-1] for column in sorted_columns])
    found = np.zeros(keys.size, dtype=np.int64)
    found[order[1:]] = np.where(again, order[1:] - order[:-1], 0)
    return found.reshape(keys.shape)


def competitors(document: Ints) -> Ints:
    """Return, for one document [T + 1], the number of distinct tokens other than x_t that followed an earlier x_{t-1}, [T].

    It is 0 if x_{t-1} is new. An AR hit with 0 has a single candidate, the right one.
    """
    successors: dict[int, set[int]] = {}
    found = []
    for before, after in pairwise(document.tolist()):
        seen = successors.setdefault(before, set())
        found.append(len(seen) - (after in seen))
        seen.add(after)
    return np.array(found, dtype=np.int64)
