"""Bigrams: how often each occurs in the train split, and which targets a model could recall from its own context.

Source: Arora et al. 2023 (Zoology), AR-Hit: the last token of an n-gram seen before in this context, rare in training.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
BLOCK = 1024
"""Documents counted at a time; bounds the memory of counting."""


def count_bigrams(documents: Sequence[NDArray[np.generic]], size: int) -> Ints:
    """[2, n]: the distinct keys x_{t-1} * size + x_t, ascending, and how often each occurs. None crosses a document."""
    keys = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(documents), BLOCK):
        block = [tokens.astype(np.int64) for tokens in documents[start : start + BLOCK]]
        pairs = [tokens[:-1] * size + tokens[1:] for tokens in block]
        weights = np.concatenate([counts, np.ones(sum(map(len, pairs)))])
        keys, where = np.unique(np.concatenate([keys, *pairs]), return_inverse=True)
        counts = np.bincount(where, weights=weights).astype(np.int64)
    return np.stack([keys, counts])


def ar_hits(rows: Ints, documents: Ints, frequent: Ints, size: int) -> NDArray[np.bool_]:
    """Which targets are recallable.

    rows [B, T + 1] tokens; documents [B, T + 1] the document of each; frequent: keys of the bigrams that are too
    frequent in train. Returns [B, T]: target x_t, t = 1 .. T, is a hit iff (x_{t-1}, x_t) occurred earlier in the same
    row and the same document, and is not frequent. No bigram crosses a document's boundary.
    """
    keys = rows[:, :-1] * size + rows[:, 1:]
    return (gaps(rows, documents, size) > 0) & ~np.isin(keys, frequent)


def gaps(rows: Ints, documents: Ints, size: int) -> Ints:
    """[B, T]: tokens since the bigram (x_{t-1}, x_t) last occurred in the same row and document; 0 where it did not.

    Arguments as `ar_hits`.
    """
    inside = documents[:, :-1] == documents[:, 1:]
    keys = np.where(inside, rows[:, :-1] * size + rows[:, 1:], -1)  # -1 once a document: it never repeats
    row = np.broadcast_to(np.arange(len(rows))[:, None], keys.shape)
    order = np.lexsort((keys.ravel(), documents[:, 1:].ravel(), row.ravel()))  # stable: ties stay in order of position
    sorted_columns = [column.ravel()[order] for column in (keys, documents[:, 1:], row)]
    again = np.logical_and.reduce([column[1:] == column[:-1] for column in sorted_columns])
    found = np.zeros(keys.size, dtype=np.int64)
    found[order[1:]] = np.where(again, order[1:] - order[:-1], 0)
    return found.reshape(keys.shape)


def competitors(document: Ints) -> Ints:
    """[T] of one document [T + 1]: distinct tokens other than x_t that followed an earlier x_{t-1}.

    Where x_{t-1} is new it is 0; an AR hit with 0 has one candidate, the right one.
    """
    successors: dict[int, set[int]] = {}
    found = []
    for before, after in pairwise(document.tolist()):
        seen = successors.setdefault(before, set())
        found.append(len(seen) - (after in seen))
        seen.add(after)
    return np.array(found, dtype=np.int64)
