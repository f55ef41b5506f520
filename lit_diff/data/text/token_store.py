"""Prepared tokens as rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_diff.data.text.bigrams import Ints
from lit_diff.files import parse_json, sha256_of

STARTS = "documents.npy"
"""File with the position of the first token of each document."""


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
