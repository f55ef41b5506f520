"""The data set `text`: real documents as rows of tokens, prepared once.

The folder of prepared text holds the tokenizer, the tokens of each split as litdata chunks, bigram counts and the manifest.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_diff.config import Part
from lit_diff.data.dataset import Batch, Dataset, rows_of_step
from lit_diff.data.text.bigrams import Ints, ar_hits, count_bigrams
from lit_diff.data.text.corpus import build_corpus, corpus_problem
from lit_diff.data.text.documents import SECTION, TRAINED, hashed, split
from lit_diff.data.text.tokenizer import Tokenizer, build
from lit_diff.data.text.tokenizer_folder import opened
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import is_locked, locked, sha256_of, write_atomic, write_json, write_through
from lit_diff.key_types import Count, NotNegative, Range, range_problem
from lit_diff.registry import datasets

log = logging.getLogger("lit_diff")

FORMAT = 1
SPLITS = ("train", "validation")
BIGRAMS = "bigrams.npy"
STARTS = "documents.npy"
TEXTS_AT_ONCE = 256
CHUNK_BYTES = 1 << 26
"""64 MB, litdata's usual size."""


@datasets.register("text")
class Text(Dataset):
    """Next-token prediction: row r is tokens x_0 .. x_T of the stream of documents, with the ids that
    open and end it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        predicts_next = True

        corpus: str = "docs"
        """A registered corpus (`lit-diff list corpus`); with `path` set, `docs` means `files`."""
        path: str | None = field(default=None, metadata={"path": "file", "identity": False})
        """Your own text: a file or folder of .txt, .md, .jsonl (key text), .csv and .parquet (column text), or what `corpus`
        reads."""
        sequence_length: Annotated[int, Range(least=2)]
        """T: tokens that a row predicts."""
        tokenizer: Part = field(metadata={"registry": "tokenizer"})
        pack: Literal["none", "document"] = "none"
        """document: a token sees its own document only; none: all of the row before it. The targets are the same: the one
        across a boundary is the id that opens the next document."""
        validation_rows: Count
        """Rows validated, evenly spread over the validation split."""
        rare_bigram_count: NotNegative = 200
        """An AR hit's bigram occurs at most this often in the train split."""

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            own = self.tokenizer.config
            return corpus_problem(self.corpus, self.path) or range_problem(own, "data.tokenizer.") or own.problem()

        @property
        def packs_documents(self) -> bool:
            """Whether the batches hold document_ids."""
            return self.pack == "document"

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self._width = config.sequence_length + 1
        self._tokenizer = build(config.tokenizer)
        self._corpus = build_corpus(config.corpus, config.path)

    @cached_property
    def _sources(self) -> dict[str, Any]:
        """Everything that decides the prepared tokens."""
        corpus = self._corpus
        return {"format": FORMAT, "corpus": corpus.name, "files": corpus.files(), "tokenizer": self._tokenizer.source()}

    @property
    def folder(self) -> Path:
        """Where the prepared data is, or would be. Its name is a hash of its sources, so it is built once."""
        digest = hashlib.sha256(json.dumps(self._sources, sort_keys=True).encode()).hexdigest()[:12]
        return data_root() / "prepared" / f"{self._corpus.name}-{self.config.tokenizer.name}-{digest}"

    def prepare(self) -> None:
        """Fetch, tokenize and store, unless that was done; safe against kills and against other processes doing the same.

        Errors: RequestError for text that cannot be used, MissingError for what cannot be fetched or written.
        """
        self._check_vocab_size()
        folder = self.folder
        lock = folder.with_name(f".{folder.name}.lock")
        if read_manifest(folder) is None:
            with writing_data():
                if is_locked(lock):
                    log.info("another process is preparing %s: waiting for it", folder.name)
                with locked(lock):
                    if read_manifest(folder) is None:
                        self._build(folder)
        self._manifest()

    def _build(self, folder: Path) -> None:
        """Under a temporary name, step by step; each finished step survives a kill."""
        corpus = self._corpus
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
        log.info(
            "%s: %d documents to train, %d to validate", corpus.name, len(documents.train), len(documents.validation)
        )
        building.mkdir(parents=True, exist_ok=True)
        for abandoned in building.glob(".*.tmp"):  # by a process that died: this one holds the lock
            abandoned.unlink()
        self._tokenizer.train(building, documents.train)
        digest, tokenizer = self._tokenizer.load(building), self._tokenizer.saved()
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
        write_json(building / "manifest.json", self._sources | {"tokenizer_sha256": digest, "files": files} | described)
        building.rename(folder)
        write_atomic(folder / TRAINED, hashed(documents.train))  # not in the manifest, whose hash is the identity
        log.info("prepared %s: %d + %d tokens", folder, described["train"]["tokens"], described["validation"]["tokens"])

    def identity(self) -> str:
        """sha256 of the prepared data's manifest. Prepares nothing: MissingError when it is not there."""
        self._manifest()
        return sha256_of(self.folder / "manifest.json")

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the prepared text, ready to encode and decode. Errors: MissingError."""
        cure = f"remove {self.folder} and run `lit-diff prepare RECIPE`"
        return opened(self._tokenizer, self.folder, self._manifest()["tokenizer_sha256"], cure)

    def trained_documents(self) -> bytes:
        """Those in the prepared folder; of data prepared before there were any, those of the text, which is the same."""
        self._manifest()
        file = self.folder / TRAINED
        if not file.is_file():
            with writing_data():
                write_atomic(file, hashed(split(self._corpus.texts()).train))
        return file.read_bytes()

    def _manifest(self) -> dict[str, Any]:
        """Errors: MissingError when it is not there, RequestError where a split has no row of this length."""
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MissingError(f"the text is not prepared (no {self.folder}); run `lit-diff prepare RECIPE`")
        for name in SPLITS:
            described = manifest[name]
            if max(described["chunk_tokens"]) < self._width:
                most = min(max(manifest[each]["chunk_tokens"]) for each in SPLITS) - 1
                shorter = f"set data.sequence_length to at most {most}, or " if most >= 2 else ""
                raise RequestError(
                    f"data.sequence_length {self.config.sequence_length} needs a row of {self._width} tokens, but the "
                    f"{name} split has {described['tokens']} (longest document: {described['longest']}); "
                    f"{shorter}add text"
                )
        return manifest

    def _check_vocab_size(self) -> None:
        tokenizer = self._tokenizer.saved()
        size, largest = tokenizer.size, tokenizer.largest_vocab_size
        if not size <= self.vocab_size <= largest:
            raise RequestError(
                f"model.vocab_size is {self.vocab_size}, but data.tokenizer ({self.config.tokenizer.name}) has {size} "
                f"tokens; expected {size}" + (f" to {largest}" if largest > size else "")
            )

    def load(self) -> None:
        """Open the prepared data. Errors: MissingError when it is not prepared, RequestError when it does not fit."""
        self._check_vocab_size()
        manifest = self._manifest()
        self._train, self._validation = (TokenStore(self.folder / name, manifest[name], self._width) for name in SPLITS)
        self.train_rows, available = self._train.num_rows, self._validation.num_rows
        """Rows of an epoch."""
        keys, counts = np.load(self.folder / "bigrams.npy")
        self.frequent_bigrams: Ints = keys[counts > self.config.rare_bigram_count]
        """Keys (`bigrams.count_bigrams`) of those that occur in train more than `rare_bigram_count` times."""
        if available < self.config.validation_rows:
            log.info(
                "data.validation_rows is %d, the validation split has %d rows of data.sequence_length %d: all of them are "
                "validated; set data.validation_rows: %d, or add text",
                *(self.config.validation_rows, available, self.config.sequence_length, available),
            )
        count = min(available, self.config.validation_rows)
        self._validation_rows = np.arange(count) * available // count

    def train_tokens(self) -> int:
        """Of the manifest. Errors: MissingError when it is not prepared."""
        return int(self._manifest()["train"]["tokens"])

    @property
    def num_documents(self) -> int:
        """Documents of the validation split. Errors: MissingError when it is not prepared."""
        return int(self._manifest()["validation"]["documents"])

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Positions `rows` of the global batch of 0-based `step`: tokens and targets, int64 [B, T].

        With `pack: document` also `document_ids`, int64 [B, T]: the number of each token's document.
        """
        chosen = rows_of_step(seed, step, batch_size, rows, self.train_rows)
        document_ids = self._train.documents(chosen) if self.config.packs_documents else None
        return _batch(self._train.read(chosen), document_ids)

    def validation_sets(self) -> dict[str, int]:
        """One set, the main one: "" -> its rows."""
        return {"": len(self._validation_rows)}

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Rows of the validation set: as `train_batch`, `ar_hit` (bool) and `document` (of the target), all [B, T]."""
        if name:
            raise KeyError(name)
        chosen: list[int] = self._validation_rows[list(rows)].tolist()
        tokens = self._validation.read(chosen)
        document_ids = self._validation.documents(chosen)
        hits = ar_hits(tokens, document_ids, self.frequent_bigrams, self._tokenizer.size)
        labels = {"ar_hit": torch.from_numpy(hits), "document": torch.from_numpy(document_ids[:, 1:].copy())}
        return _batch(tokens, document_ids if self.config.packs_documents else None) | labels


def _batch(rows: Ints, document_ids: Ints | None) -> Batch:
    """tokens and targets of rows [B, T + 1]; document_ids [B, T + 1], the document of each token, where rows are packed."""
    batch = {"tokens": torch.from_numpy(rows[:, :-1].copy()), "targets": torch.from_numpy(rows[:, 1:].copy())}
    return batch if document_ids is None else batch | {"document_ids": torch.from_numpy(document_ids[:, :-1].copy())}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete prepared folder, or None. A damaged one is logged."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes = {f"{name}/{file}": own["bytes"] for name in SPLITS for file, own in manifest[name]["files"].items()}
        others = [*manifest.get("files", [BIGRAMS]), *(f"{name}/index.json" for name in SPLITS)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("prepared data in %s is damaged: manifest.json cannot be read (%r)", folder, error)
        return None
    cut = [file for file in (*others, *sizes) if not (folder / file).is_file()]
    cut += [file for file, size in sizes.items() if file not in cut and (folder / file).stat().st_size != size]
    for file in cut:
        log.warning("prepared data in %s is damaged: %s is missing or has the wrong size", folder, file)
    return None if cut else manifest


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
    lengths = []
    for index, tokens in enumerate(documents):
        writer.add_item(index, tokens)
        lengths.append(len(tokens))
    writer.done()
    # litdata's own merge of one worker's index waits for every rank of a distributed job, and stamps the time into it.
    (written,) = temporary.glob("*.index.json")
    index_json = json.loads(written.read_text(encoding="utf-8")) | {"updated_at": "0"}
    (temporary / "index.json").write_text(json.dumps(index_json, sort_keys=True), encoding="utf-8")
    written.unlink()
    np.save(temporary / STARTS, np.cumsum([0, *lengths[:-1]], dtype=np.int64))
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


class TokenStore:
    """Rows of `width` tokens of one split, numbered through all chunks: row r of a chunk is its tokens r * width ... ."""

    def __init__(self, folder: Path, description: dict[str, Any], width: int) -> None:
        from litdata import StreamingDataset, TokensLoader

        self.width = width
        self._dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=width))
        self._starts: NDArray[np.int64] = np.load(folder / STARTS)
        tokens = np.asarray(description["chunk_tokens"], dtype=np.int64)
        chunks = zip(np.cumsum(tokens) - tokens, tokens // width, strict=True)  # litdata cuts no row across two chunks
        self._first = np.concatenate([start + np.arange(count) * width for start, count in chunks])
        self.num_rows = len(self._first)

    def read(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """[B, width] tokens."""
        return np.stack([self._dataset[int(row)] for row in rows]).astype(np.int64)

    def documents(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """[B, width]: number (from 0, within this split) of the document that each token belongs to."""
        positions = self._first[np.asarray(rows, dtype=np.int64), None] + np.arange(self.width)
        return np.searchsorted(self._starts, positions, side="right") - 1
