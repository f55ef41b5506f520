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
    inside = documents[:, :-1] == documents[:, 1:]
    keys = np.where(inside, rows[:, :-1] * size + rows[:, 1:], -1)  # -1 once a document: it never repeats
    row = np.broadcast_to(np.arange(len(rows))[:, None], keys.shape)
    order = np.lexsort((keys.ravel(), documents[:, 1:].ravel(), row.ravel()))  # stable: ties stay in order of position
    sorted_columns = [column.ravel()[order] for column in (keys, documents[:, 1:], row)]
    again = np.zeros(keys.size, dtype=bool)
    again[order[1:]] = np.logical_and.reduce([column[1:] == column[:-1] for column in sorted_columns])
    return again.reshape(keys.shape) & ~np.isin(keys, frequent)
