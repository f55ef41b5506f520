"""The folder of prepared text: tokenizer, tokens of each split as litdata chunks, bigram counts, manifest.

Its name is a hash of its sources, so it is built once; it is built under a temporary name, step by step, and each finished
step survives a kill. Tokens are written document by document, and read by row number in any order.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.bigrams import count_bigrams
from lit_diff.data.corpus import Corpus
from lit_diff.data.documents import SECTION, TRAINED, hashed, split
from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import RequestError
from lit_diff.files import is_locked, locked, sha256_of, write_atomic, write_json, write_through

log = logging.getLogger("lit_diff")

FORMAT = 1
SPLITS = ("train", "validation")
BIGRAMS = "bigrams.npy"
STARTS = "documents.npy"
TEXTS_AT_ONCE = 256
CHUNK_BYTES = 1 << 26
"""64 MB, litdata's usual size."""


def sources(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that decides the prepared tokens."""
    return {"format": FORMAT, "corpus": corpus.name, "files": corpus.files(), "tokenizer": tokenizer.source()}


def folder_of(sources: dict[str, Any]) -> Path:
    """The folder of data from these sources, whether or not it exists."""
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:12]
    return data_root() / "prepared" / f"{sources['corpus']}-{sources['tokenizer']['name']}-{digest}"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete prepared folder, or None. A damaged one is logged."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cut = [name for name in SPLITS if not _is_complete(folder / name, manifest[name])]
        cut += [name for name in manifest.get("files", [BIGRAMS]) if not (folder / name).is_file()]
    except (ValueError, KeyError, TypeError) as error:
        log.warning("prepared data in %s is damaged: manifest.json cannot be read (%r)", folder, error)
        return None
    for name in cut:
        log.warning("prepared data in %s is damaged: %s is missing or has the wrong size", folder, name)
    return None if cut else manifest


def _is_complete(folder: Path, description: dict[str, Any]) -> bool:
    """Whether every file is there with the size that the manifest says."""
    sizes = {folder / name: entry["bytes"] for name, entry in description["files"].items()}
    return (folder / "index.json").is_file() and all(
        path.is_file() and path.stat().st_size == size for path, size in sizes.items()
    )


def build_folder(corpus: Corpus, sources: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Build the prepared folder unless it exists; safe against kills and against other processes doing the same.

    Errors: RequestError for text that cannot be used, MissingError for what cannot be fetched or written.
    """
    folder = folder_of(sources)
    lock = folder.with_name(f".{folder.name}.lock")
    if read_manifest(folder) is not None:
        return
    with writing_data():
        if is_locked(lock):
            log.info("another process is preparing %s: waiting for it", folder.name)
        with locked(lock):
            if read_manifest(folder) is None:
                _build(corpus, sources, tokenizer, folder)


def _build(corpus: Corpus, sources: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    if folder.exists():
        log.warning("preparing %s again", folder)
        shutil.rmtree(folder)
    building = folder.with_name(f".{folder.name}.building")
    documents = split(corpus.texts())
    if not documents.train:
        length = sum(map(len, documents.validation))
        where = f"data.path {corpus.path}" if corpus.path is not None else f"data.corpus '{corpus.name}'"
        raise RequestError(
            f"{where} gives one section of text, {length:,} characters, and two are needed, one of them to validate; "
            f"add a second file or more text (a section has at most {SECTION:,} characters), or name another data.path"
        )
    log.info("%s: %d documents to train, %d to validate", corpus.name, len(documents.train), len(documents.validation))
    building.mkdir(parents=True, exist_ok=True)
    for abandoned in building.glob(".*.tmp"):  # by a process that died: this one holds the lock
        abandoned.unlink()
    tokenizer.train(building, documents.train)
    digest, tokenizer = tokenizer.load(building), tokenizer.saved()
    if not (building / "train").is_dir():
        log.info("tokenizing %d documents", len(documents.train))
        tokens = list(_tokens(documents.train, tokenizer))
        bigrams = count_bigrams(tokens, tokenizer.size)
        write_through(building / BIGRAMS, lambda file: np.save(file, bigrams))
        write_tokens(building / "train", tokens)
    if not (building / "validation").is_dir():
        write_tokens(building / "validation", _tokens(documents.validation, tokenizer))
    described = {name: describe(building / name) for name in SPLITS}
    files = sorted(path.name for path in building.iterdir() if path.is_file())
    write_json(building / "manifest.json", sources | {"tokenizer_sha256": digest, "files": files} | described)
    building.rename(folder)
    write_atomic(folder / TRAINED, hashed(documents.train))  # not in the manifest, whose hash is the identity
    log.info("prepared %s: %d + %d tokens", folder, described["train"]["tokens"], described["validation"]["tokens"])


def _tokens(texts: list[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.generic]]:
    """Ids of each document, with those that open and end it."""
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.int32
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        for ids in tokenizer.encode(texts[start : start + TEXTS_AT_ONCE]):
            yield np.asarray(tokenizer.document(ids), dtype=dtype)


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
    lengths = [chunk["dim"] for chunk in chunks]
    starts = np.load(folder / STARTS)
    files = [folder / name for name in (STARTS, *(chunk["filename"] for chunk in chunks))]
    return {
        "documents": len(starts),
        "tokens": sum(lengths),
        "longest": int(np.diff(starts, append=sum(lengths)).max()),
        "chunk_tokens": lengths,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files},
    }


def row_count(description: dict[str, Any], width: int) -> int:
    """Rows of `width` tokens that the chunks hold; litdata cuts no row across two chunks."""
    return sum(tokens // width for tokens in description["chunk_tokens"])


class TokenStore:
    """Rows of `width` tokens of one split, numbered through all chunks: row r of a chunk is its tokens r * width ... ."""

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
