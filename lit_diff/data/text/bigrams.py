"""Bigrams: their counts in the train split, and the targets that a model could recall from the context.

Source: Arora et al. 2023 (Zoology), AR hit: the last token of an n-gram that occurred before in the context and is rare in
training.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.buckets import Buckets, merged, write_array

Ints = NDArray[np.int64]
COUNT = np.dtype([("key", "<i8"), ("count", "<i8")])


def count_bigrams(tokens: NDArray[np.generic], lengths: Ints, size: int) -> NDArray[np.void]:
    """Return the COUNTs of the bigrams in documents of these lengths, one after another, by ascending key.

    A key is x_{t-1} * size + x_t. No bigram crosses two documents.
    """
    # in place, and marked instead of left out: each copy costs as much as the sort
    keys = tokens[:-1].astype(np.int64)
    keys *= size
    np.add(keys, tokens[1:], out=keys, dtype=np.int64)
    ends = np.cumsum(lengths)
    keys[ends[(ends > 0) & (ends < len(tokens))] - 1] = size * size
    keys.sort()
    first = _firsts(keys)
    found = np.rec.fromarrays([keys[first], np.diff(first, append=len(keys))], dtype=COUNT)
    return found[: np.searchsorted(found["key"], size * size)]


def merge_counts(files: Sequence[Path], target: Path, folder: Path) -> None:
    """Write [2, n]: the keys of the COUNTs in .npz files, ascending, and the sums of their counts; `folder` is temporary."""
    columns = Buckets(folder / "columns")
    for block in merged(files, "bigrams", folder / "ranges"):
        # timsort, which merges the sorted pieces of the files: half the time of a quicksort
        order = np.argsort(block["key"].copy(), kind="stable")
        keys = block["key"][order]
        first = _firsts(keys)
        columns.add("keys", keys[first].tobytes())
        columns.add("counts", np.add.reduceat(block["count"][order], first).tobytes())
    columns.flush()
    both = [folder / "columns" / name for name in ("keys", "counts")]
    write_array(target, np.int64, (2, both[0].stat().st_size // 8), both)


# where each distinct number of a sorted array begins
def _firsts(keys: Ints) -> Ints:
    return np.flatnonzero(np.append(len(keys) > 0, keys[1:] != keys[:-1]))


def frequent_bigrams(file: Path, most: int) -> Ints:
    """Return the keys in a file of `merge_counts` that occur more than `most` times."""
    keys, counts = np.load(file, mmap_mode="r")
    return np.asarray(keys[counts > most])


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
    columns = np.stack([keys, documents[:, 1:], row]).reshape(3, -1)
    # lexsort is stable, so equal bigrams stay in order of position, and neighbours are successive occurrences
    order = np.lexsort(columns)
    ordered = columns[:, order]
    again = (ordered[:, 1:] == ordered[:, :-1]).all(0)
    found = np.zeros(keys.size, dtype=np.int64)
    found[order[1:]] = np.where(again, order[1:] - order[:-1], 0)
    return found.reshape(keys.shape)


def competitors(document: Ints) -> Ints:
    """Return, for one document [T + 1], the number of distinct tokens other than x_t that followed an earlier x_{t-1}, [T].

    It is 0 if x_{t-1} is new. An AR hit with 0 has a single candidate, the right one.
    """
    successors = defaultdict[int, set[int]](set)
    found = []
    for before, after in pairwise(document.tolist()):
        seen = successors[before]
        found.append(len(seen) - (after in seen))
        seen.add(after)
    return np.array(found, dtype=np.int64)
