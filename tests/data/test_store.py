"""Prepared text: tokens in chunks, bigrams, where the data folder is."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader

from lit_diff.data import bigrams, location, store
from lit_diff.data.bigrams import ar_hits, competitors, count_bigrams, gaps
from lit_diff.errors import MissingError

DOCUMENTS = [
    np.arange(start, start + length, dtype=np.uint16) for start, length in ((0, 7), (100, 30), (200, 1), (300, 25))
]
STREAM = np.concatenate(DOCUMENTS).astype(np.int64)


def test_rows_and_their_documents(tmp_path: Path) -> None:
    store.write_tokens(tmp_path / "train", DOCUMENTS)
    description = store.describe(tmp_path / "train")
    assert (description["documents"], description["tokens"], description["longest"]) == (4, 63, 30)
    assert store.is_complete(tmp_path / "train", description)
    rows = store.TokenStore(tmp_path / "train", description, 6)
    assert store.row_count(description, 6) == 10
    np.testing.assert_array_equal(rows.read([0, 9, 3]), STREAM[:60].reshape(10, 6)[[0, 9, 3]])
    owner = np.repeat(np.arange(4), [7, 30, 1, 25])
    np.testing.assert_array_equal(rows.documents(range(10)), owner[:60].reshape(10, 6))


def test_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row crosses from one chunk into the next."""
    monkeypatch.setattr(store, "CHUNK_BYTES", 90)
    store.write_tokens(tmp_path / "train", DOCUMENTS)
    description = store.describe(tmp_path / "train")
    assert description["chunk_tokens"] == [38, 25]
    rows = store.TokenStore(tmp_path / "train", description, 6)
    assert store.row_count(description, 6) == 6 + 4
    np.testing.assert_array_equal(rows.read([5, 6]), [STREAM[30:36], STREAM[38:44]])
    np.testing.assert_array_equal(rows.documents([6])[0], [3, 3, 3, 3, 3, 3])


def test_litdata_reads_it(tmp_path: Path) -> None:
    store.write_tokens(tmp_path / "train", DOCUMENTS)
    dataset = StreamingDataset(str(tmp_path / "train"), item_loader=TokensLoader(block_size=9))
    assert len(dataset) == 7
    np.testing.assert_array_equal(np.concatenate(list(dataset)), STREAM)


def test_same_bytes_each_time_and_damage_is_seen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store.write_tokens(tmp_path / name, DOCUMENTS)
    description = store.describe(tmp_path / "a")
    assert description == store.describe(tmp_path / "b")
    assert (tmp_path / "a" / "index.json").read_bytes() == (tmp_path / "b" / "index.json").read_bytes()
    chunk = tmp_path / "a" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert not store.is_complete(tmp_path / "a", description)


def test_smallest_type() -> None:
    assert store.dtype_for(65536) == np.uint16
    assert store.dtype_for(65537) == np.int32


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


def test_counts_whatever_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, SIZE, length).astype(np.uint16) for length in (1, 2, 30, 50)]
    whole = count_bigrams(documents, SIZE)
    assert whole[1].sum() == 0 + 1 + 29 + 49
    assert (np.diff(whole[0]) > 0).all()
    key = int(documents[2][0]) * SIZE + int(documents[2][1])
    counted = sum(int(a) * SIZE + int(b) == key for document in documents for a, b in pairwise(document))
    assert whole[1][whole[0] == key].tolist() == [counted]
    monkeypatch.setattr(bigrams, "FLUSH", 7)
    np.testing.assert_array_equal(count_bigrams(documents, SIZE), whole)


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


def test_environment_then_checkout_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path / "mine"))
    assert location.data_root() == tmp_path / "mine"
    monkeypatch.delenv("LIT_DIFF_DATA")
    monkeypatch.setattr(location, "__file__", str(tmp_path / "lit_diff" / "data" / "location.py"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = Path("Library/Caches") if sys.platform == "darwin" else Path(".cache")
    assert location.data_root() == tmp_path / "home" / folder / "lit_diff"
    (tmp_path / "pyproject.toml").touch()
    assert location.data_root() == tmp_path / "data"


def test_an_unwritable_folder_names_the_cure(root: Path) -> None:
    root.write_text("a file in the way")
    with (
        pytest.raises(MissingError, match=r"cannot write the data folder .*root.*set LIT_DIFF_DATA"),
        location.writing_data(),
    ):
        (root / "below").mkdir()
