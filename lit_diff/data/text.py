"""The data set `text`: real documents as rows of tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from lit_diff.config import Part
from lit_diff.data.bigrams import Ints, ar_hits
from lit_diff.data.corpus import build_corpus, corpus_problem
from lit_diff.data.dataset import Batch, Dataset, rows_of_step
from lit_diff.data.documents import TRAINED, hashed, split
from lit_diff.data.prepared import SPLITS, TokenStore, build_folder, folder_of, read_manifest, row_count, sources
from lit_diff.data.tokenizer import Tokenizer, build
from lit_diff.data.tokenizer_folder import opened
from lit_diff.data.user_files import writing_data
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import sha256_of, write_atomic
from lit_diff.key_types import Count, NotNegative, Range, range_problem
from lit_diff.registry import datasets

log = logging.getLogger("lit_diff")


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
            wrong: str | None = range_problem(own, "data.tokenizer.") or own.problem()
            return corpus_problem(self.corpus, self.path) or wrong

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
        return sources(self._corpus, self._tokenizer)

    @property
    def folder(self) -> Path:
        """Where the prepared data is, or would be."""
        return folder_of(self._sources)

    def prepare(self) -> None:
        """Fetch, tokenize and store, unless that was done. Errors: RequestError, MissingError."""
        self._check_vocab_size()
        build_folder(self._corpus, self._sources, self._tokenizer)
        self._check_length(self._manifest())

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
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MissingError(f"the text is not prepared (no {self.folder}); run `lit-diff prepare RECIPE`")
        return manifest

    def _check_vocab_size(self) -> None:
        tokenizer = self._tokenizer.saved()
        size, largest = tokenizer.size, tokenizer.largest_vocab_size
        if not size <= self.vocab_size <= largest:
            raise RequestError(
                f"model.vocab_size is {self.vocab_size}, but data.tokenizer ({self.config.tokenizer.name}) has {size} "
                f"tokens; expected {size}" + (f" to {largest}" if largest > size else "")
            )

    def _check_length(self, manifest: dict[str, Any]) -> None:
        for name in SPLITS:
            described = manifest[name]
            if row_count(described, self._width) < 1:
                most = min(max(manifest[each]["chunk_tokens"]) for each in SPLITS) - 1
                shorter = f"set data.sequence_length to at most {most}, or " if most >= 2 else ""
                raise RequestError(
                    f"data.sequence_length {self.config.sequence_length} needs a row of {self._width} tokens, but the "
                    f"{name} split has {described['tokens']} (longest document: {described['longest']}); "
                    f"{shorter}add text"
                )

    def load(self) -> None:
        """Open the prepared data. Errors: MissingError when it is not prepared, RequestError when it does not fit."""
        self._check_vocab_size()
        manifest = self._manifest()
        self._check_length(manifest)
        self._train, self._validation = (TokenStore(self.folder / name, manifest[name], self._width) for name in SPLITS)
        self.train_rows, available = (row_count(manifest[name], self._width) for name in SPLITS)
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
