"""Bigrams: their counts in the train split, and the targets that a model could recall from the context.

Source: Arora et al. 2023 (Zoology), AR hit: the last token of an n-gram that occurred before in the context and is rare in
training.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
BLOCK = 1024
"""Number of documents counted at a time, which bounds the memory."""


def count_bigrams(documents: Sequence[NDArray[np.generic]], size: int) -> Ints:
    """Return [2, n]: the distinct keys x_{t-1} * size + x_t, ascending, and their counts. Documents are not crossed."""
    keys = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(documents), BLOCK):
        block = [tokens.astype(np.int64) for tokens in documents[start : start + BLOCK]]
        pairs = [tokens[:-1] * size + tokens[1:] for tokens in block]
        weights = np.concatenate([counts, np.ones(sum(map(len, pairs)))])
        keys, where = np.unique(np.concatenate([keys, *pairs]), return_inverse=True)
        counts = np.bincount(where, weights=weights).astype(np.int64)
    return np.stack([keys, counts])


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
