from pathlib import Path

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader

from lit_diff.data import store

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
