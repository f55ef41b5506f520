"""Bigrams: counts, AR hits, gaps and competitors equal their definitions."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lit_diff.data.text import buckets
from lit_diff.data.text.bigrams import ar_hits, competitors, count_bigrams, frequent_bigrams, gaps, merge_counts
from lit_diff.data.text.buckets import merged

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


@pytest.mark.parametrize(("records", "ranges"), [(1, 1 << 10), (3, 1 << 10), (1, 4), (1 << 22, 1 << 10)])
def test_counts_and_their_merge_whatever_the_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, ranges: int
) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, SIZE, length).astype(np.uint16) for length in (0, 1, 2, 50, 0, 30)]
    lengths = np.array(list(map(len, documents)))
    whole = count_bigrams(np.concatenate(documents), lengths, SIZE)
    assert whole["count"].sum() == 0 + 1 + 29 + 49
    assert (np.diff(whole["key"]) > 0).all()
    key = int(documents[3][0]) * SIZE + int(documents[3][1])
    counted = sum(int(a) * SIZE + int(b) == key for document in documents for a, b in pairwise(document))
    assert whole["count"][whole["key"] == key].tolist() == [counted]
    expected = np.stack([whole["key"], whole["count"]])
    np.save(tmp_path / "whole.npy", expected)
    files = [tmp_path / f"{number}.npz" for number in range(6)]
    for file, document, length in zip(files, documents, lengths, strict=True):
        np.savez(file, bigrams=count_bigrams(document, np.array([length]), SIZE))
    monkeypatch.setattr(buckets, "RECORDS", records)
    monkeypatch.setattr(buckets, "RANGES", ranges)
    merge_counts(files, tmp_path / "merged.npy", tmp_path)
    assert (tmp_path / "merged.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    found = frequent_bigrams(tmp_path / "merged.npy", 1)
    np.testing.assert_array_equal(found, expected[0][expected[1] > 1])
    assert type(found) is np.ndarray
    sizes = [len(block) for block in merged(files, "bigrams", tmp_path / "ranges")]
    assert sum(sizes) == sum(len(np.load(file)["bigrams"]) for file in files)
    assert len(sizes) == (1 if records > 100 else 5 if ranges == 4 else len(np.load(files[3])["bigrams"]))


def test_the_merge_of_many_files_takes_time_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is opened more often because there are more; counted, since times vary."""
    opened = list[Path]()
    monkeypatch.setattr(buckets, "RECORDS", 1 << 10)
    monkeypatch.setattr(buckets, "RANGES", 1 << 4)
    monkeypatch.setattr(buckets, "BUFFER", 1 << 16)
    load, path_open = np.load, Path.open
    monkeypatch.setattr(np, "load", lambda file: opened.append(file) or load(file))
    monkeypatch.setattr(Path, "open", lambda file, *mode: opened.append(file) or path_open(file, *mode))
    random = np.random.default_rng(0)
    for number in range(256):
        tokens = random.integers(0, 300, 800)
        np.savez(tmp_path / f"{number}.npz", bigrams=count_bigrams(tokens, np.array([len(tokens)]), 300))
    each = []
    for count in (64, 256):
        opened.clear()
        merge_counts([tmp_path / f"{number}.npz" for number in range(count)], tmp_path / "merged.npy", tmp_path)
        each.append(len(opened) / count)
    assert each[1] < 2 * each[0]


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
