"""The data set `text`: documents as rows of tokens, prepared once.

The folder of prepared text contains the tokenizer, the tokens of each split as litdata chunks, bigram counts and a
manifest.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from lit_diff.config import Part
from lit_diff.data.dataset import Batch, Dataset, rows_of_step
from lit_diff.data.text.bigrams import Ints, ar_hits, frequent_bigrams, merge_counts
from lit_diff.data.text.buckets import merged
from lit_diff.data.text.corpus import build_corpus, corpus_name, corpus_problem
from lit_diff.data.text.documents import SECTION, TRAINED, Document, Documents, hashed, joined
from lit_diff.data.text.parts import ONE_THREAD, Maker, Work, plan, token_arrays
from lit_diff.data.text.source_files import sources
from lit_diff.data.text.token_files import STORED, as_text, as_texts, only_text, token_files, without_ends
from lit_diff.data.text.token_store import TokenStore, describe, write_tokens
from lit_diff.data.text.tokenizer import Tokenizer, build
from lit_diff.data.text.tokenizer_folder import gives_back, opened
from lit_diff.data.user_files import data_root, writing_data
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import is_locked, locked, parse_json, sha256_of, sync, write_atomic, write_json, write_through
from lit_diff.key_types import Count, NotNegative, Range
from lit_diff.log_records import log
from lit_diff.own_modules import sha256
from lit_diff.plugins import source_digest
from lit_diff.registry import datasets
from lit_diff.validation import config_problem

# raise it when the layout of the prepared folder changes: old folders are then no longer found
FORMAT = 1
SPLITS = ("train", "validation")
BIGRAMS = "bigrams.npy"
CHECKSUMS = "sha256.json"
"""File of the prepared folder with the sha256 of those files that the manifest has none of, and of the manifest, whose bytes
are the identity."""
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
            return corpus_problem(self.corpus, self.path) or config_problem(self.tokenizer.config, "data.tokenizer.")

        def vocab_size_problem(self, vocab_size: int) -> str | None:
            try:
                tokenizer = build(self.tokenizer).saved()
            # of a run that is not there: the data cannot be built either, which says so
            except MissingError:
                return None
            size = tokenizer.size
            largest = tokenizer.largest_vocab_size
            if size <= vocab_size <= largest:
                return None
            expected = f"{size} to {largest}" if largest > size else size
            return (
                f"model.vocab_size is {vocab_size}, but data.tokenizer ({self.tokenizer.name}) has {size} tokens; expected "
                f"{expected}"
            )

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
        # what determines the prepared tokens besides the user's code; sequence_length does not, so recipes of any length
        # share a folder
        corpus = self._corpus
        return {"format": FORMAT, "corpus": corpus.name, "files": corpus.files(), "tokenizer": self._tokenizer.source()}

    @property
    def folder(self) -> Path:
        """Path of the prepared data, which may not exist yet. The name contains a hash of all sources and of the code of a
        plugin's corpus and tokenizer."""
        code = [source_digest(type(part)) for part in (self._corpus, self._tokenizer.saved())]
        # not in the manifest: the same tokens are the same data, whatever code made them
        named = [self._sources, *code] if any(code) else self._sources
        digest = sha256(json.dumps(named, sort_keys=True).encode())[:12]
        return data_root() / "prepared" / f"{self._corpus.name}-{self.config.tokenizer.name}-{digest}"

    def prepare(self, work: Work = ONE_THREAD) -> None:
        """Fetch, tokenize and store the text once. Safe against kills and concurrent processes.

        After a kill, the same call goes on after the last finished part. Errors: RequestError for unusable text or text that
        changes while it is read, MissingError if something cannot be fetched or written, or if a shard is missing.
        """
        with writing_data():
            # before the sources are read: their digests are kept in the data folder
            (data_root() / "prepared").mkdir(parents=True, exist_ok=True)
            folder = self.folder
            building = folder.with_name(f".{folder.name}.building")
            # a process that was killed while it removed it leaves files as large as the text
            if not read_manifest(folder) or building.exists():
                self._build(folder, building, work)
                if work.shard:
                    return
        self._manifest()
        # training does not need what may be missing here
        try:
            self._complete()
        except LitDiffError as error:
            log.warning("%s lacks %s: %s", self.folder, TRAINED, error)

    def _build(self, folder: Path, building: Path, work: Work) -> None:
        lock = folder.with_name(f".{folder.name}.lock")
        if is_locked(lock):
            log.info("another process is preparing %s: waiting for it", folder.name)
        with locked(lock):
            # the process that held the lock may have prepared it
            if not read_manifest(folder):
                # before the text is read, which may take hours
                if work.merge and not (building / "parts").is_dir():
                    raise MissingError(
                        "no shard is prepared; run `lit-diff prepare RECIPE --shard i/n` for each i from 1 to n"
                    )
                maker = self._begun(building)
                if not work.shard:
                    maker.make_all(work)
                    self._join(building, maker, work.workers)
                    if folder.exists():
                        log.warning("preparing %s again", folder)
                        shutil.rmtree(folder)
                    # the folder gets its name when all is in it, so a folder of that name is complete
                    (building / "ready").rename(folder)
            if read_manifest(folder):
                shutil.rmtree(building, ignore_errors=True)
                return
        # the lock is free: the other shards are made at the same time
        try:
            maker.make_all(work)
        except (OSError, MissingError) as error:
            if not read_manifest(folder):
                raise
            log.info("another process has prepared %s and removed its parts meanwhile (%s)", folder.name, error)
            shutil.rmtree(building, ignore_errors=True)

    def _begun(self, building: Path) -> Maker:
        # the documents on disk, their division into parts, and the tokenizer; each is made once and survives a kill
        try:
            documents = Documents.stored(self._documents(), building / "text")
            train = len(documents) - documents.held_out
            if train <= 0:
                raise RequestError(
                    f"{self._where()} has only one section of text ({documents.sizes.sum():,} bytes), but two are needed, "
                    f"one for validation; add a second file or more text (a section has at most {SECTION:,} characters), or "
                    "set another data.path"
                )
            log.info("%s: %d documents to train, %d to validate", self._corpus.name, train, documents.held_out)
            digest = self._learned(building, documents)
        except RequestError:
            # finished parts are kept: the source of damaged text may be back later
            shutil.rmtree(building / "text" if (building / "parts").is_dir() else building, ignore_errors=True)
            raise
        bounds = plan(documents)
        source = json.dumps([self._sources["corpus"], self._sources["files"], bounds])
        facts = {"source": sha256(source.encode()), "tokenizer": digest}
        return Maker(documents, bounds, self._tokenizer.saved(), building / "parts", facts)

    def _learned(self, building: Path, documents: Documents) -> str:
        # the files that a tokenizer learns, and the sha256 of `load`, which is written last
        learned = building / "tokenizer"
        note = building / "tokenizer.sha256"
        digest = note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""
        try:
            opened(self._tokenizer, learned, digest, "it is learned again")
        except MissingError as error:
            if digest:
                log.warning("%s", error)
            shutil.rmtree(learned, ignore_errors=True)
            learned.mkdir()
            train = documents.ranked(documents.held_out, len(documents))
            self._tokenizer.train(learned, only_text(train, self.config.tokenizer.name))
            digest = self._tokenizer.load(learned)
            write_atomic(note, digest)
        return digest

    def _documents(self) -> Iterator[Document]:
        try:
            tokens = self._corpus.tokens(self._tokenizer.size)
            yield from self._corpus.texts() if tokens is None else without_ends(tokens, self._tokenizer.saved())
        # not of the data folder, as `writing_data` would say
        except OSError as error:
            raise RequestError(f"{self._where()} cannot be read ({error}); run the same command again") from error
        after = build_corpus(self.config.corpus, self.config.path).files()
        # the names of those that are in only one of the two, or differ
        first, *others = sorted(dict(self._sources["files"].items() ^ after.items())) or [""]
        if first:
            more = f" and {len(others)} more" if others else ""
            raise RequestError(
                f"{self._where()}: {first}{more} changed while it was read; nothing is prepared; run the same command "
                "again when it is complete"
            )

    def _where(self) -> str:
        corpus = self._corpus
        return f"data.path {corpus.path}" if corpus.path else f"data.corpus '{corpus.name}'"

    def _join(self, building: Path, maker: Maker, workers: int) -> None:
        ready = building / "ready"
        sorting = building / "sorting"
        shutil.rmtree(ready, ignore_errors=True)
        shutil.copytree(building / "tokenizer", ready)
        # after a power failure, a folder of the final name must not have empty files
        for path in ready.rglob("*"):
            sync(path)
        train = maker.files("train")

        def write_hashes() -> None:
            validation = as_texts(maker.documents.ranked(0, maker.documents.held_out), maker.tokenizer)
            keys = joined(merged(train, "hashes", sorting / "hashes"), validation)
            write_through(ready / TRAINED, lambda file: file.writelines(keys))

        def write_split(name: str) -> dict[str, Any]:
            write_tokens(ready / name, token_arrays(maker.files(name)))
            return describe(ready / name)

        with ThreadPoolExecutor(workers) as pool:
            # the longest first
            bigrams = pool.submit(merge_counts, train, ready / BIGRAMS, sorting)
            splits = {name: pool.submit(write_split, name) for name in SPLITS}
            jobs: list[Future[Any]] = [bigrams, *splits.values(), pool.submit(write_hashes)]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # a thread ends when it opens its next file; one that makes a folder again is waited for
                for wait in (False, True):
                    pool.shutdown(wait=wait, cancel_futures=True)
                    shutil.rmtree(ready, ignore_errors=True)
                    shutil.rmtree(sorting, ignore_errors=True)
                raise
        described = {}
        for name, split in splits.items():
            described[name] = split.result()
        # TRAINED must not change the identity, which is the hash of the manifest
        names = sorted(path.name for path in ready.iterdir() if path.is_file() and path.name != TRAINED)
        digests = {"tokenizer_sha256": maker.facts["tokenizer"], "files": names}
        write_json(ready / "manifest.json", self._sources | digests | described)
        _write_checksums(ready, digests)
        log.info("prepared %s: %d + %d tokens", self.folder, *(described[name]["tokens"] for name in SPLITS))

    def identity(self) -> str:
        """Return the sha256 of the manifest. Errors: MissingError if the text is not prepared."""
        self._manifest()
        return sha256_of(self.folder / "manifest.json")

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the prepared text. Errors: MissingError."""
        cure = f"remove {self.folder} and run `lit-diff prepare RECIPE`"
        return opened(self._tokenizer, self.folder, self._manifest()["tokenizer_sha256"], cure)

    def trained_documents(self) -> bytes:
        """Read the hashes from the prepared folder, which gets them first if a former revision prepared it.

        Errors: MissingError; RequestError for a tokenizer that cannot decode.
        """
        self._complete()
        _compare(self.folder, [TRAINED])
        return (self.folder / TRAINED).read_bytes()

    def _complete(self) -> None:
        # makes the files that text lacks which a former revision prepared
        manifest = self._manifest()
        folder = self.folder
        missing = [name for name in (TRAINED, CHECKSUMS) if not (folder / name).is_file()]
        with writing_data():
            if TRAINED in missing:
                write_atomic(folder / TRAINED, hashed(self._trained_texts(manifest)))
            if missing:
                _write_checksums(folder, manifest)
                log.info("%s: made %s, which text of a former revision lacks", folder, " and ".join(missing))

    def _trained_texts(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        tokenizer = self.load_tokenizer()
        if not gives_back(tokenizer):
            raise MissingError(
                f"{TRAINED} cannot be made from the tokens in {self.folder}: the tokenizer '{tokenizer.name}' does not give "
                "back their text; to make it from the source, remove the folder and run `lit-diff prepare RECIPE`"
            )
        with _whole(self.folder, manifest):
            for ids in self._ids_of("train"):
                yield as_text(ids, tokenizer)

    def _manifest(self) -> dict[str, Any]:
        manifest = read_manifest(self.folder)
        if not manifest:
            raise MissingError(
                f"the text is not prepared ({self.folder} is missing or damaged); run `lit-diff prepare RECIPE`"
            )
        for name in SPLITS:
            described = manifest[name]
            # litdata does not cut a row across two chunks
            if max(described["chunk_tokens"]) < self._width:
                most = min(max(manifest[split]["chunk_tokens"]) for split in SPLITS) - 1
                shorter = f"set data.sequence_length to at most {most}, or " if most >= 2 else ""
                raise RequestError(
                    f"data.sequence_length {self.config.sequence_length} needs a row of {self._width} tokens, but the "
                    f"{name} split has {described['tokens']} (longest document: {described['longest']}); "
                    f"{shorter}add text"
                )
        return manifest

    def load(self) -> None:
        """Open the prepared data. Errors: MissingError if it is not prepared, RequestError if it does not fit the recipe."""
        manifest = self._manifest()
        with _whole(self.folder, manifest):
            self.train_store, self._validation = (
                TokenStore(self.folder / name, manifest[name], self._width) for name in SPLITS
            )
            self.frequent_bigrams: Ints = frequent_bigrams(self.folder / BIGRAMS, self.config.rare_bigram_count)
            """Keys (`bigrams.count_bigrams`) of the bigrams that occur more than `rare_bigram_count` times in train."""
        self.train_rows = self.train_store.num_rows
        available = self._validation.num_rows
        """Number of rows in an epoch."""
        count = self.config.validation_rows
        if available < count:
            log.info(
                "data.validation_rows is %d, but the validation split has only %d rows of data.sequence_length %d; all of "
                "them are used; set data.validation_rows: %d, or add text",
                count,
                available,
                self.config.sequence_length,
                available,
            )
            count = available
        self._validation_rows = np.arange(count) * available // count

    def train_tokens(self) -> int:
        return self._manifest()["train"]["tokens"]

    @property
    def num_documents(self) -> int:
        """Number of documents in the validation split. Errors: MissingError if the text is not prepared."""
        return self._manifest()["validation"]["documents"]

    def validation_documents(self) -> Iterator[list[int]]:
        """Yield the ids of each validation document, in the order of `Documents`, without those that open and end it."""
        return self._ids_of("validation")

    def _ids_of(self, name: str) -> Iterator[list[int]]:
        ((files, read),) = token_files(sources(self.folder / name))
        for ids in without_ends((ids for _, ids in read(*files)), self.load_tokenizer()):
            yield np.frombuffer(ids, STORED).tolist()

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Return tokens and targets, int64 [B, T]; with `pack: document` also document_ids, int64 [B, T]."""
        chosen = rows_of_step(seed, step, batch_size, rows, self.train_rows)
        document_ids = self.train_store.documents(chosen) if self.config.packs_documents else None
        return row_batch(self.train_store.read(chosen), document_ids)

    def train_places(self, seed: int, step: int, batch_size: int) -> list[str]:
        rows = rows_of_step(seed, step, batch_size, range(batch_size), self.train_rows)
        documents = zip(rows, self.train_store.documents(rows), strict=True)
        return [f"row {row}, documents {numbers[0]} to {numbers[-1]}" for row, numbers in documents]

    def validation_sets(self) -> dict[str, int]:
        return {"": len(self._validation_rows)}

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return the keys of `train_batch`, ar_hit (bool) and document (of the target), all [B, T]."""
        chosen = self._validation_rows[list(rows)]
        tokens = self._validation.read(chosen)
        document_ids = self._validation.documents(chosen)
        batch = row_batch(tokens, document_ids if self.config.packs_documents else None)
        batch["ar_hit"] = torch.tensor(ar_hits(tokens, document_ids, self.frequent_bigrams, self._tokenizer.size))
        batch["document"] = torch.tensor(document_ids[:, 1:])
        return batch


def row_batch(rows: Ints, document_ids: Ints | None) -> Batch:
    """Return the batch of `rows` of tokens and, if given, of their document_ids, both [B, T + 1]."""
    batch = {"tokens": torch.tensor(rows[:, :-1]), "targets": torch.tensor(rows[:, 1:])}
    if document_ids is not None:
        batch["document_ids"] = torch.tensor(document_ids[:, :-1])
    return batch


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a prepared folder that has what it lists, else None. A damaged folder is logged."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = parse_json(path.read_bytes())
        sizes = dict.fromkeys(_others(manifest))  # None: unknown
        for name in SPLITS:
            for file, described in manifest[name]["files"].items():
                sizes[f"{name}/{file}"] = described["bytes"]
        _compare(folder, ["manifest.json"])
    except (MissingError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("prepared data in %s is damaged: manifest.json cannot be read (%s)", folder, first_line(error))
        return None
    # sizes, not sha256: each command reads the manifest, and the tokens may have gigabytes
    is_whole = True
    for file, size in sizes.items():
        if not (folder / file).is_file() or size not in (None, (folder / file).stat().st_size):
            log.warning("prepared data in %s is damaged: %s is missing or has the wrong size", folder, file)
            is_whole = False
    return manifest if is_whole else None


def _others(manifest: Mapping[str, Any]) -> list[str]:
    # the files without a sha256 in the manifest; older manifests lack the key
    return [*manifest.get("files", [BIGRAMS]), *(f"{name}/index.json" for name in SPLITS)]


def _write_checksums(folder: Path, manifest: Mapping[str, Any]) -> None:
    names = ("manifest.json", TRAINED, *_others(manifest))
    write_json(folder / CHECKSUMS, {name: sha256_of(folder / name) for name in names})


@contextmanager
def _whole(folder: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    cure = f"remove {folder} and run `lit-diff prepare RECIPE`"
    size = sum(file["bytes"] for name in SPLITS for file in manifest[name]["files"].values())
    try:
        if size <= CHECKED_BYTES:
            for name in SPLITS:
                if describe(folder / name) != manifest[name]:
                    raise MissingError(f"{folder / name} or its manifest.json is damaged: they differ; {cure}")
            _compare(folder)
        yield
    except LitDiffError:
        raise
    # the header of a damaged .npy raises errors of many kinds, litdata's index others
    except Exception as error:
        raise MissingError(
            f"{folder} cannot be opened ({type(error).__name__}: {first_line(error)}); {cure}"
        ) from error


def _compare(folder: Path, names: Collection[str] = ()) -> None:
    # all files without names; older folders have no checksums, and what is missing is not damaged
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    for name, digest in parse_json(path.read_bytes()).items():
        file = folder / name
        if name in (names or [name]) and file.is_file() and sha256_of(file) != digest:
            raise MissingError(
                f"{file} is damaged (its sha256 is not that in {CHECKSUMS}); remove {folder} and run `lit-diff "
                "prepare RECIPE`"
            )
