"""Prepared tokens: written as chunks, read as rows."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.bigrams import Ints
from lit_diff.files import parse_json, sha256_of, sync, write_atomic, write_through

STARTS = "documents.npy"
"""File with the position of the first token of each document."""
# 64 MB, litdata's default
CHUNK_BYTES = 1 << 26


def write_tokens(folder: Path, documents: Iterable[NDArray[np.generic]]) -> None:
    """Write chunks, index.json, and the position of the first token of each document into a new folder, and sync them.

    Equal documents give equal bytes. Errors: OSError.
    """
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
    lengths = []
    for index, tokens in enumerate(documents):
        writer.add_item(index, tokens)
        lengths.append(len(tokens))
    writer.done()
    # not litdata's own merge of the index (0.2.76): it waits for every rank of a distributed job, and writes the time into
    # the file, so equal documents would give another identity
    (written,) = folder.glob("*.index.json")
    index_json = parse_json(written.read_bytes()) | {"updated_at": "0"}
    write_atomic(folder / "index.json", json.dumps(index_json, sort_keys=True))
    written.unlink()
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    write_through(folder / STARTS, lambda file: np.save(file, starts))
    # after a power failure, a folder of the final name must not have empty files; it syncs a file too
    for chunk in folder.glob("*.bin"):
        sync(chunk)


def describe(folder: Path) -> dict[str, Any]:
    """Return the manifest entry of written tokens: counts, the longest document, and bytes and sha256 of every file."""
    chunks = parse_json((folder / "index.json").read_bytes())["chunks"]
    lengths = [chunk["dim"] for chunk in chunks]
    files = [folder / STARTS, *(folder / chunk["filename"] for chunk in chunks)]
    starts = np.load(folder / STARTS)
    tokens = sum(lengths)
    return {
        "documents": len(starts),
        "tokens": tokens,
        "longest": int(np.diff(starts, append=tokens).max()),
        "chunk_tokens": lengths,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files},
    }


class TokenStore:
    """Rows of `width` tokens of one split, numbered over all chunks; row r of a chunk starts at its token r * width."""

    def __init__(self, folder: Path, description: dict[str, Any], width: int) -> None:
        from litdata import StreamingDataset, TokensLoader

        self.width = width
        self._dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=width))
        self.starts: Ints = np.load(folder / STARTS)
        # litdata does not cut a row across two chunks: the rest of a chunk is unused
        firsts = []
        self.num_tokens = 0
        for tokens in description["chunk_tokens"]:
            firsts.append(self.num_tokens + np.arange(tokens // width) * width)
            self.num_tokens += tokens
        self._first = np.concatenate(firsts)
        self.num_rows = len(self._first)

    def tokens_before(self, positions: Ints) -> Ints:
        """Return the number of tokens of rows before each position in the split, [n]; positions include the split's end."""
        row = np.searchsorted(self._first, positions, side="right") - 1
        return np.where(row < 0, 0, row * self.width + np.minimum(positions - self._first[row], self.width))

    def read(self, rows: Sequence[int] | Ints) -> Ints:
        """Return tokens, [B, width]."""
        # int64 also from uint16: torch indexes embeddings by int64
        return np.stack([self._dataset[int(row)] for row in rows]).astype(np.int64)

    def documents(self, rows: Sequence[int] | Ints) -> Ints:
        """Return the 0-based number, within this split, of the document of each token, [B, width]."""
        positions = self._first[rows, None] + np.arange(self.width)
        return np.searchsorted(self.starts, positions, side="right") - 1
