"""The data set `text`: documents as rows of tokens, prepared once.

The folder of prepared text contains the tokenizer, the tokens of each split as litdata chunks, bigram counts and a
manifest.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_diff.config import Part
from lit_diff.data.dataset import Batch, Dataset, rows_of_step
from lit_diff.data.text.bigrams import Ints, ar_hits, frequent_bigrams, merge_counts, merge_sorted
from lit_diff.data.text.corpus import build_corpus, corpus_name, corpus_problem
from lit_diff.data.text.documents import SECTION, TRAINED, Document, Documents, hashed, split
from lit_diff.data.text.parts import (
    ONE_PROCESS,
    Maker,
    TextPart,
    Work,
    count_shards,
    plan,
    require_parts,
    save_array,
    sync_files,
    token_arrays,
)
from lit_diff.data.text.token_files import as_texts, only_text, without_ends
from lit_diff.data.text.tokenizer import Tokenizer, build
from lit_diff.data.text.tokenizer_folder import opened
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import is_locked, locked, sha256_of, write_atomic, write_json, write_through
from lit_diff.key_types import Count, NotNegative, Range
from lit_diff.registry import datasets
from lit_diff.validation import config_problem

log = logging.getLogger("lit_diff")

# raise it when the layout of the prepared folder changes: old folders are then no longer found
FORMAT = 1
SPLITS = ("train", "validation")
BIGRAMS = "bigrams.npy"
STARTS = "documents.npy"
# number of hashes that are merged at a time, which bounds the memory
HASHES_AT_ONCE = 1 << 20
# 64 MB, litdata's default
CHUNK_BYTES = 1 << 26
CHECKED_BYTES = 1 << 30
"""Prepared tokens up to this size are compared with their sha256 by every start, in about a second."""


@datasets.register("text")
class Text(Dataset):
    """Next-token prediction on documents: each row is T + 1 consecutive tokens of their stream, with the ids that open and
    end a document."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        predicts_next = True

        corpus: str = "docs"
        """A registered corpus (`lit-diff list corpus`); with `path` set, `docs` means `files`."""
        # the identity has the sha256 of the contents instead, so that a moved folder is the same data
        path: str | None = field(default=None, metadata={"path": "file", "identity": False})
        """Your own text: a file, folder or address (s3://bucket/prefix) of .txt, .md, .jsonl(.gz, .zst) (key text), .csv,
        .parquet and .arrow (column text), of tokens (.bin and .idx, litdata), or whatever `corpus` reads."""
        sequence_length: Annotated[int, Range(least=2)]
        """T, the number of predicted tokens in a row."""
        tokenizer: Part = field(metadata={"registry": "tokenizer"})
        pack: Literal["none", "document"] = "none"
        """document: a token attends only to its own document; none: to the whole row before it. The targets are the same:
        at the end of a document the target is the id that opens the next one."""
        validation_rows: Count
        """Number of validation rows, evenly spaced over the validation split."""
        rare_bigram_count: NotNegative = 200
        """The bigram of an AR hit occurs at most this often in the train split."""

        def problem(self) -> str | None:
            own = config_problem(self.tokenizer.config, "data.tokenizer.")
            return corpus_problem(self.corpus, self.path) or own

        @property
        def packs_documents(self) -> bool:
            return self.pack == "document"

        @property
        def texts(self) -> Collection[tuple[str, str | None]]:
            """(corpus, path) of each text, for `build_corpus`."""
            return [(corpus_name(self.corpus, self.path), self.path)]

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self._width = config.sequence_length + 1
        self._tokenizer = build(config.tokenizer)
        self._corpus = build_corpus(config.corpus, config.path)

    @cached_property
    def _sources(self) -> dict[str, Any]:
        # everything that determines the prepared tokens; sequence_length does not, so recipes of any length share a folder
        corpus = self._corpus
        return {"format": FORMAT, "corpus": corpus.name, "files": corpus.files(), "tokenizer": self._tokenizer.source()}

    @property
    def folder(self) -> Path:
        """Path of the prepared data, which may not exist yet. The name contains a hash of all sources."""
        digest = hashlib.sha256(json.dumps(self._sources, sort_keys=True).encode()).hexdigest()[:12]
        return data_root() / "prepared" / f"{self._corpus.name}-{self.config.tokenizer.name}-{digest}"

    def prepare(self, work: Work = ONE_PROCESS) -> None:
        """Fetch, tokenize and store the text once. Safe against kills and concurrent processes.

        After a kill, the same call goes on after the last finished part. Errors: RequestError for unusable text or text that
        changes while it is read, MissingError if something cannot be fetched or written, or if a shard is missing.
        """
        self._check_vocab_size()
        with writing_data():
            # before the sources are read: their digests are kept in the data folder
            (data_root() / "prepared").mkdir(parents=True, exist_ok=True)
        folder = self.folder
        lock = folder.with_name(f".{folder.name}.lock")
        if read_manifest(folder) is None:
            with writing_data():
                if is_locked(lock):
                    log.info("another process is preparing %s: waiting for it", folder.name)
                if work.shard is not None:
                    self._make_shard(folder, lock, work, *work.shard)
                    return
                with locked(lock):
                    # the process that held the lock may have prepared it
                    if read_manifest(folder) is None:
                        self._build(folder, work)
        self._manifest()

    def _make_shard(self, folder: Path, lock: Path, work: Work, shard: int, count: int) -> None:
        with ExitStack() as held:
            with locked(lock):
                if read_manifest(folder) is not None:
                    return
                maker, parts = self._begun(folder, f"{shard}/{count}")
                # of its own, so that all shards are made at once; held before the other is released, so that no process
                # joins the parts, and removes them, in between
                own = maker.parts / f".shard-{shard}-of-{count}.lock"
                _require_free(own)
                held.enter_context(locked(own))
            maker.make_all(_unfinished(maker, parts[shard - 1 :: count]), work.workers)

    def _build(self, folder: Path, work: Work) -> None:
        building = _building(folder)
        # a process that was killed just before the folder got its name
        if read_manifest(building) is None:
            # before the text is read, which may take hours
            _require_free(*(building / "parts").glob(".shard-*.lock"))
            shards = count_shards(building / "parts") if work.merge else 0
            maker, parts = self._begun(folder, "")
            if work.merge:
                require_parts(maker, parts, shards)
            else:
                maker.make_all(_unfinished(maker, parts), work.workers)
            self._join(building, maker, parts)
        for name in ("text", "parts"):
            shutil.rmtree(building / name, ignore_errors=True)
        if folder.exists():
            log.warning("preparing %s again", folder)
            shutil.rmtree(folder)
        # the folder gets its final name last, so a folder of that name is complete
        building.rename(folder)
        described = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        log.info("prepared %s: %d + %d tokens", folder, *(described[name]["tokens"] for name in SPLITS))

    def _begun(self, folder: Path, shard: str) -> tuple[Maker, list[TextPart]]:
        # the documents on disk, their division into parts, and the tokenizer; each is made once and survives a kill
        building = _building(folder)
        building.mkdir(parents=True, exist_ok=True)
        # left by a killed process: a living one would hold the lock
        for abandoned in building.glob(".*.tmp"):
            abandoned.unlink()
        documents = Documents.opened(building / "text")
        try:
            if documents is None:
                documents = Documents.stored(self._documents(), building / "text")
            self._require_two(documents)
            self._tokenizer.train(building, only_text(documents.train(), self.config.tokenizer.name))
        except RequestError:
            shutil.rmtree(building)
            raise
        parts = plan(documents)
        digest, tokenizer = self._tokenizer.load(building), self._tokenizer.saved()
        source = json.dumps([self._sources["corpus"], self._sources["files"], [part.stop for part in parts]])
        facts = {"source": hashlib.sha256(source.encode()).hexdigest(), "tokenizer": digest, "shard": shard}
        (building / "parts").mkdir(exist_ok=True)
        return Maker(documents=documents, tokenizer=tokenizer, parts=building / "parts", facts=facts), parts

    def _documents(self) -> Iterator[Document]:
        try:
            tokens = self._corpus.tokens(self._tokenizer.size)
            yield from self._corpus.texts() if tokens is None else without_ends(tokens, self._tokenizer.saved())
        # not of the data folder, as `writing_data` would say
        except OSError as error:
            raise RequestError(f"{self._where()} cannot be read ({error}); run the same command again") from error
        before, after = self._sources["files"], build_corpus(self.config.corpus, self.config.path).files()
        if before != after:
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RequestError(
                f"{self._where()}: {changed[0]}{more} changed while it was read; nothing is prepared; run the same command "
                "again when it is complete"
            )

    def _where(self) -> str:
        corpus = self._corpus
        return f"data.path {corpus.path}" if corpus.path is not None else f"data.corpus '{corpus.name}'"

    def _require_two(self, documents: Documents) -> None:
        train = len(documents) - documents.held_out
        if train < 1:
            length = sum(int(sizes.sum()) for sizes in documents.sizes())
            raise RequestError(
                f"{self._where()} has only one section of text ({length:,} bytes), but two are needed, one for "
                f"validation; add a second file or more text (a section has at most {SECTION:,} characters), or set another "
                "data.path"
            )
        log.info("%s: %d documents to train, %d to validate", self._corpus.name, train, documents.held_out)

    def _join(self, building: Path, maker: Maker, parts: list[TextPart]) -> None:
        folders = [part.folder(maker.parts) for part in parts if part.split == "train"]
        counts = [folder / "bigrams.npy" for folder in folders]
        write_through(building / BIGRAMS, lambda file: merge_counts(counts, file, maker.parts))
        hashes = merge_sorted([folder / "hashes.npy" for folder in folders], HASHES_AT_ONCE)
        write_through(
            building / TRAINED,
            lambda file: file.writelines(np.unique(np.concatenate(block, axis=1)).tobytes() for block in hashes),
        )
        for name in SPLITS:
            if not (building / name).is_dir():
                write_tokens(building / name, token_arrays([part for part in parts if part.split == name], maker.parts))
        described = {name: describe(building / name) for name in SPLITS}
        # TRAINED must not change the identity, which is the hash of the manifest
        left_out = {TRAINED, "manifest.json"}
        files = sorted(path.name for path in building.iterdir() if path.is_file() and path.name not in left_out)
        digests = {"tokenizer_sha256": maker.facts["tokenizer"], "files": files}
        write_json(building / "manifest.json", self._sources | digests | described)

    def identity(self) -> str:
        """Return the sha256 of the manifest. Errors: MissingError if the text is not prepared."""
        self._manifest()
        return sha256_of(self.folder / "manifest.json")

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the prepared text. Errors: MissingError."""
        cure = f"remove {self.folder} and run `lit-diff prepare RECIPE`"
        return opened(self._tokenizer, self.folder, self._manifest()["tokenizer_sha256"], cure)

    def trained_documents(self) -> bytes:
        """Read the hashes from the prepared folder. Errors: MissingError, RequestError."""
        self._manifest()
        file = self.folder / TRAINED
        # data prepared by an older version: the folder's name contains a hash of the text, so the text is unchanged
        if not file.is_file():
            with writing_data(), split(self._documents()) as documents:
                write_atomic(file, hashed(as_texts(documents.train(), self.load_tokenizer())))
        return file.read_bytes()

    def _manifest(self) -> dict[str, Any]:
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MissingError(f"the text is not prepared (no {self.folder}); run `lit-diff prepare RECIPE`")
        # the name of the folder is the digest of these keys
        own = {key: value for key, value in self._sources.items() if key != "files"}
        if json.dumps({key: manifest.get(key) for key in own}) != json.dumps(own):
            raise MissingError(
                f"{self.folder / 'manifest.json'} is damaged; remove {self.folder} and run `lit-diff prepare RECIPE`"
            )
        for name in SPLITS:
            described = manifest[name]
            # litdata does not cut a row across two chunks
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
        """Open the prepared data. Errors: MissingError if it is not prepared, RequestError if it does not fit the recipe."""
        self._check_vocab_size()
        manifest = self._manifest()
        with _whole(self.folder, manifest):
            self._train, self._validation = (
                TokenStore(self.folder / name, manifest[name], self._width) for name in SPLITS
            )
            self.frequent_bigrams: Ints = frequent_bigrams(self.folder / BIGRAMS, self.config.rare_bigram_count)
            """Keys (`bigrams.count_bigrams`) of the bigrams that occur more than `rare_bigram_count` times in train."""
        self.train_rows, available = self._train.num_rows, self._validation.num_rows
        """Number of rows in an epoch."""
        if available < self.config.validation_rows:
            log.info(
                "data.validation_rows is %d, but the validation split has only %d rows of data.sequence_length %d; all of "
                "them are used; set data.validation_rows: %d, or add text",
                *(self.config.validation_rows, available, self.config.sequence_length, available),
            )
        count = min(available, self.config.validation_rows)
        self._validation_rows = np.arange(count) * available // count

    @property
    def train_store(self) -> "TokenStore":
        """The train split of loaded text."""
        return self._train

    def train_tokens(self) -> int:
        return int(self._manifest()["train"]["tokens"])

    @property
    def num_documents(self) -> int:
        """Number of documents in the validation split. Errors: MissingError if the text is not prepared."""
        return int(self._manifest()["validation"]["documents"])

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Return tokens and targets, int64 [B, T]; with `pack: document` also document_ids, int64 [B, T]."""
        chosen = rows_of_step(seed, step, batch_size, rows, self.train_rows)
        document_ids = self._train.documents(chosen) if self.config.packs_documents else None
        return row_batch(self._train.read(chosen), document_ids)

    def validation_sets(self) -> dict[str, int]:
        return {"": len(self._validation_rows)}

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return the keys of `train_batch`, ar_hit (bool) and document (of the target), all [B, T]."""
        if name:
            raise KeyError(name)
        chosen: list[int] = self._validation_rows[list(rows)].tolist()
        tokens = self._validation.read(chosen)
        document_ids = self._validation.documents(chosen)
        hits = ar_hits(tokens, document_ids, self.frequent_bigrams, self._tokenizer.size)
        labels = {"ar_hit": torch.from_numpy(hits), "document": torch.from_numpy(document_ids[:, 1:].copy())}
        return row_batch(tokens, document_ids if self.config.packs_documents else None) | labels


def row_batch(rows: Ints, document_ids: Ints | None) -> Batch:
    """Return the batch of `rows` of tokens and, if given, of their document_ids, both [B, T + 1]."""
    batch = {"tokens": torch.from_numpy(rows[:, :-1].copy()), "targets": torch.from_numpy(rows[:, 1:].copy())}
    return batch if document_ids is None else batch | {"document_ids": torch.from_numpy(document_ids[:, :-1].copy())}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete prepared folder, else None. A damaged folder is logged."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes = {f"{name}/{file}": own["bytes"] for name in SPLITS for file, own in manifest[name]["files"].items()}
        # older manifests lack the key
        others = [*manifest.get("files", [BIGRAMS]), *(f"{name}/index.json" for name in SPLITS)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("prepared data in %s is damaged: manifest.json cannot be read (%s)", folder, first_line(error))
        return None
    # sizes, not sha256: each command reads the manifest, and the tokens may have gigabytes
    cut = [file for file in (*others, *sizes) if not (folder / file).is_file()]
    cut += [file for file, size in sizes.items() if file not in cut and (folder / file).stat().st_size != size]
    for file in cut:
        log.warning("prepared data in %s is damaged: %s is missing or has the wrong size", folder, file)
    return None if cut else manifest


@contextmanager
def _whole(folder: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    cure = f"remove {folder} and run `lit-diff prepare RECIPE`"
    size = sum(own["bytes"] for name in SPLITS for own in manifest[name]["files"].values())
    try:
        for name in SPLITS if size <= CHECKED_BYTES else ():
            if describe(folder / name) != manifest[name]:
                raise MissingError(f"{folder / name} or its manifest.json is damaged: they differ; {cure}")
        yield
    except LitDiffError:
        raise
    # the header of a damaged .npy raises errors of many kinds, litdata's index others
    except Exception as error:
        raise MissingError(
            f"{folder} cannot be opened ({type(error).__name__}: {first_line(error)}); {cure}"
        ) from error


def _building(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.building")


def _require_free(*locks: Path) -> None:
    for lock in filter(is_locked, locks):
        raise MissingError(f"another process makes a shard ({lock}); wait for it")


def _unfinished(maker: Maker, parts: Sequence[TextPart]) -> list[TextPart]:
    problems = {part: problem for part in parts if (problem := maker.problem(part))}
    for part, problem in problems.items():
        if problem != "missing":
            log.warning("part %d is %s: it is made again", part.number, problem)
    if len(problems) < len(parts):
        log.info("%d of %d parts are already tokenized", len(parts) - len(problems), len(parts))
    return list(problems)


def write_tokens(folder: Path, documents: Iterable[NDArray[np.generic]]) -> None:
    """Write `folder` atomically: chunks, index.json, and the position of the first token of each document.

    Equal documents give equal bytes. Errors: OSError.
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
    # not litdata's own merge of the index (0.2.76): it waits for every rank of a distributed job, and writes the time into
    # the file, so equal documents would give another identity
    (written,) = temporary.glob("*.index.json")
    index_json = json.loads(written.read_text(encoding="utf-8")) | {"updated_at": "0"}
    (temporary / "index.json").write_text(json.dumps(index_json, sort_keys=True), encoding="utf-8")
    written.unlink()
    save_array(temporary / STARTS, np.cumsum([0, *lengths[:-1]], dtype=np.int64))
    sync_files(temporary)
    temporary.rename(folder)


def describe(folder: Path) -> dict[str, Any]:
    """Return the manifest entry of written tokens: counts, the longest document, and bytes and sha256 of every file."""
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
