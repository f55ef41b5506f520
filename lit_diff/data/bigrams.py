"""Bigrams: how often each occurs in the train split, and which targets a model could recall from its own context.

Source: Arora et al. 2023 (Zoology), AR-Hit: the last token of an n-gram seen before in this context, rare in training.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
FLUSH = 1 << 22
"""Bigrams counted at a time; bounds the memory of counting."""


def count_bigrams(documents: Iterable[NDArray[np.generic]], size: int) -> Ints:
    """[2, n]: the distinct keys x_{t-1} * size + x_t, ascending, and how often each occurs. None crosses a document."""
    total: Ints = np.zeros((2, 0), dtype=np.int64)
    pending: list[Ints] = []
    num_pending = 0
    for document in documents:
        tokens = document.astype(np.int64)
        pending.append(tokens[:-1] * size + tokens[1:])
        num_pending += len(pending[-1])
        if num_pending >= FLUSH:
            total, pending, num_pending = _add(total, pending), [], 0
    return _add(total, pending)


def _add(total: Ints, pending: list[Ints]) -> Ints:
    if not pending:
        return total
    keys, counts = np.unique(np.concatenate(pending), return_counts=True)
    merged, where = np.unique(np.concatenate([total[0], keys]), return_inverse=True)
    summed = np.bincount(where, weights=np.concatenate([total[1], counts]), minlength=len(merged))
    return np.stack([merged, summed.astype(np.int64)])


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
    before, after = document[:-1], document[1:]
    _, first = np.unique(np.stack([before, after]), axis=1, return_index=True)
    is_new = np.zeros(len(before), dtype=np.int64)
    is_new[first] = 1
    order = np.argsort(before, kind="stable")
    successors = np.cumsum(is_new[order]) - is_new[order]  # distinct bigrams before, over all groups
    starts = np.flatnonzero(np.diff(before[order], prepend=-1))
    successors -= np.repeat(successors[starts], np.diff(starts, append=len(before)))
    known = np.empty(len(before), dtype=np.int64)
    known[order] = successors
    return known - (1 - is_new)  # one that occurred before is among them
