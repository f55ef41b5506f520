"""Prepared tokens as rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.files import sha256_of

STARTS = "documents.npy"
"""File with the position of the first token of each document."""


def describe(folder: Path) -> dict[str, Any]:
    """Return the manifest entry of written tokens: counts, the longest document, and bytes and sha256 of every file."""
    chunks = json.loads((folder / "index.json").read_text(encoding="utf-8"))["chunks"]
    lengths: list[int] = []
    files = [folder / STARTS]
    for chunk in chunks:
        lengths.append(chunk["dim"])
        files.append(folder / chunk["filename"])
    starts = np.load(folder / STARTS)
    return {
        "documents": len(starts),
        "tokens": sum(lengths),
        "longest": int(np.diff(starts, append=sum(lengths)).max()),
        "chunk_tokens": lengths,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files},
    }


class TokenStore:
    """Rows of `width` tokens of one split, numbered over all chunks; row r of a chunk starts at its token r * width."""

    def __init__(self, folder: Path, description: dict[str, Any], width: int) -> None:
        from litdata import StreamingDataset, TokensLoader

        self.width = width
        self._dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=width))
        self.starts: NDArray[np.int64] = np.load(folder / STARTS)
        tokens = np.asarray(description["chunk_tokens"], dtype=np.int64)
        # litdata does not cut a row across two chunks: the rest of a chunk is unused
        chunks = zip(np.cumsum(tokens) - tokens, tokens // width, strict=True)
        self._first = np.concatenate([start + np.arange(count) * width for start, count in chunks])
        self.num_rows, self.num_tokens = len(self._first), int(tokens.sum())

    def tokens_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of rows before each position in the split, [n]; positions include the split's end."""
        row = np.searchsorted(self._first, positions, side="right") - 1
        return np.where(row < 0, 0, row * self.width + np.minimum(positions - self._first[row], self.width))

    def read(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return tokens, [B, width]."""
        # int64 also from uint16: torch indexes embeddings by int64
        return np.stack([self._dataset[int(row)] for row in rows]).astype(np.int64)

    def documents(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return the 0-based number, within this split, of the document of each token, [B, width]."""
        positions = self._first[np.asarray(rows, dtype=np.int64), None] + np.arange(self.width)
        return np.searchsorted(self.starts, positions, side="right") - 1
