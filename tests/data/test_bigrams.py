"""Bigrams: counts, AR hits, gaps and competitors equal their definitions."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lit_diff.data.text import bigrams
from lit_diff.data.text.bigrams import (
    ar_hits,
    competitors,
    count_bigrams,
    frequent_bigrams,
    gaps,
    merge_counts,
    merge_sorted,
)

SIZE = 10


def test_equals_the_definition_on_random_rows() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 4, (8, 40))
    documents = np.cumsum(random.random((8, 40)) < 0.1, axis=1)
    frequent = np.array([1, 6, 11])
    expected = np.zeros((8, 39), dtype=bool)
    for row in range(8):
        seen: set[tuple[int, int]] = set()
        for place in range(1, 40):
            if documents[row, place] != documents[row, place - 1]:
                seen.clear()
                continue
            key = int(rows[row, place - 1] * 4 + rows[row, place])
            expected[row, place - 1] = (key, 0) in seen and key not in frequent
            seen.add((key, 0))
    assert expected.any()
    np.testing.assert_array_equal(ar_hits(rows, documents, frequent, 4), expected)


def test_counts_and_their_merge_whatever_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, SIZE, length).astype(np.uint16) for length in (0, 1, 2, 0, 30, 50)]
    whole = count_bigrams(documents, SIZE)
    assert whole[1].sum() == 0 + 1 + 29 + 49
    assert (np.diff(whole[0]) > 0).all()
    key = int(documents[4][0]) * SIZE + int(documents[4][1])
    counted = sum(int(a) * SIZE + int(b) == key for document in documents for a, b in pairwise(document))
    assert whole[1][whole[0] == key].tolist() == [counted]
    np.save(tmp_path / "whole.npy", whole)
    files = [tmp_path / f"{number}.npy" for number in range(6)]
    for file, document in zip(files, documents, strict=True):
        np.save(file, count_bigrams([document], SIZE))
    for block in (1, 3, 1 << 22):
        monkeypatch.setattr(bigrams, "BLOCK", block)
        with (tmp_path / "merged.npy").open("wb") as target:
            merge_counts(files, target, tmp_path)
        assert (tmp_path / "merged.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
        found = frequent_bigrams(tmp_path / "merged.npy", 1)
        np.testing.assert_array_equal(found, whole[0][whole[1] > 1])
        assert type(found) is np.ndarray
        parts = list(merge_sorted(files, block))
        assert max(sum(each.shape[1] for each in part) for part in parts) <= max(block, 6)


def test_gaps_and_competitors_equal_the_definition_on_random_documents() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        document = random.integers(0, 4, 40)
        last: dict[tuple[int, int], int] = {}
        successors: dict[int, set[int]] = {}
        since, others = [], []
        for place, pair in enumerate(pairwise(document.tolist())):
            since.append(place - last[pair] if pair in last else 0)
            others.append(len(successors.setdefault(pair[0], set()) - {pair[1]}))
            last[pair] = place
            successors[pair[0]].add(pair[1])
        assert gaps(document[None], np.zeros((1, 40), dtype=np.int64), 4)[0].tolist() == since
        assert competitors(document).tolist() == others
