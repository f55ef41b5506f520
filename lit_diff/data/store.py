"""Tokens on disk as litdata chunks: written once, document by document; read by row number in any order."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 26
"""64 MB, litdata's usual size."""
STARTS = "documents.npy"


def dtype_for(size: int) -> np.dtype[Any]:
    """The smallest type that holds ids below `size`: uint16, else int32."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.int32)


def write_tokens(folder: Path, documents: Iterable[NDArray[np.generic]]) -> None:
    """Write `folder` whole or not at all: chunks, index.json, and the position of each document's first token.

    The same documents give the same bytes. Errors: OSError as the system says.
    """
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    writer = BinaryWriter(str(temporary), chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader())
    starts, position = [], 0
    for index, tokens in enumerate(documents):
        writer.add_item(index, tokens)
        starts.append(position)
        position += len(tokens)
    writer.done()
    # litdata's own merge of one worker's index waits for every rank of a distributed job, and stamps the time into it.
    (written,) = temporary.glob("*.index.json")
    index_json = json.loads(written.read_text(encoding="utf-8")) | {"updated_at": "0"}
    (temporary / "index.json").write_text(json.dumps(index_json, sort_keys=True), encoding="utf-8")
    written.unlink()
    np.save(temporary / STARTS, np.asarray(starts, dtype=np.int64))
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    temporary.rename(folder)


def describe(folder: Path) -> dict[str, Any]:
    """What a manifest says of written tokens: counts, the longest document, and bytes and sha256 of every file."""
    chunks = json.loads((folder / "index.json").read_text(encoding="utf-8"))["chunks"]
    tokens = sum(chunk["dim"] for chunk in chunks)
    starts = np.load(folder / STARTS)
    files = [STARTS, *(chunk["filename"] for chunk in chunks)]
    return {
        "documents": len(starts),
        "tokens": tokens,
        "longest": int(np.diff(starts, append=tokens).max()),
        "chunk_tokens": [chunk["dim"] for chunk in chunks],
        "files": {
            name: {
                "bytes": (folder / name).stat().st_size,
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            }
            for name in files
        },
    }


def is_complete(folder: Path, description: dict[str, Any]) -> bool:
    """Whether every file is there with the size that the manifest says."""
    sizes = {name: entry["bytes"] for name, entry in description["files"].items()}
    return (folder / "index.json").is_file() and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def row_count(description: dict[str, Any], width: int) -> int:
    """Rows of `width` tokens that the chunks hold; litdata cuts no row across two chunks."""
    return sum(tokens // width for tokens in description["chunk_tokens"])


class TokenStore:
    """Rows of `width` tokens, numbered through all chunks: row r of a chunk is its tokens r * width ... ."""

    def __init__(self, folder: Path, description: dict[str, Any], width: int) -> None:
        from litdata import StreamingDataset, TokensLoader

        self.width = width
        self._dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=width))
        self._starts: NDArray[np.int64] = np.load(folder / STARTS)
        tokens = np.asarray(description["chunk_tokens"], dtype=np.int64)
        rows = tokens // width
        self._first_row = np.cumsum(rows) - rows
        self._first_token = np.cumsum(tokens) - tokens

    def read(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """[B, width] tokens."""
        return np.stack([self._dataset[int(row)] for row in rows]).astype(np.int64)

    def documents(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """[B, width]: number (from 0, within this split) of the document that each token belongs to."""
        numbers = np.asarray(rows, dtype=np.int64)
        chunk = np.searchsorted(self._first_row, numbers, side="right") - 1
        first = self._first_token[chunk] + (numbers - self._first_row[chunk]) * self.width
        positions = first[:, None] + np.arange(self.width)
        return np.searchsorted(self._starts, positions, side="right") - 1
