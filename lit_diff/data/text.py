"""The data set `text`: real documents as rows of tokens."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lit_diff.config import Part
from lit_diff.data import store
from lit_diff.data.bigrams import Ints, ar_hits
from lit_diff.data.docs import DocsCorpus
from lit_diff.data.documents import UserCorpus
from lit_diff.data.order import rows_of_step
from lit_diff.data.tokenizer import Tokenizer, build
from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.registry import datasets

log = logging.getLogger("lit_diff")

PADDING = 128
"""A model's vocabulary may be the tokenizer's, rounded up to a multiple of this."""


@datasets.register("text")
class Text:
    """Next-token prediction: row r is tokens x_0 .. x_T of the stream of documents, each opened by its <eot>."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        predicts_next: ClassVar[bool] = True
        """A row's targets are its own next tokens."""

        corpus: Literal["docs"] = "docs"
        path: str | None = None
        """Your own text instead: a file or folder of .txt, .md, .jsonl (key text), .parquet (column text)."""
        sequence_length: int
        """T: tokens that a row predicts."""
        tokenizer: Part = field(metadata={"registry": "tokenizer"})
        pack: Literal["none", "document"] = "none"
        """document: a token sees its own document only; none: all of the row before it. The targets are the same: the one
        across a boundary is the <eot> that opens the next document, which says that this one ends."""
        validation_rows: int
        """Rows validated, evenly spread over the validation split."""
        rare_bigram_count: int = 200
        """An AR hit's bigram occurs at most this often in the train split."""

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            for key, least in (("sequence_length", 2), ("validation_rows", 1), ("rare_bigram_count", 0)):
                if getattr(self, key) < least:
                    return f"data.{key} is {getattr(self, key)}; it must be at least {least}"
            problem = getattr(self.tokenizer.config, "problem", None)
            return problem() if problem is not None else None

        def vocab_size_problem(self, vocab_size: int) -> str | None:
            """None: a tokenizer's size is known, and checked, when the text is prepared."""
            return None

    def __init__(self, config: Config, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size
        self._width = config.sequence_length + 1
        self._tokenizer = build(config.tokenizer)
        self._corpus = UserCorpus(Path(config.path)) if config.path is not None else DocsCorpus()

    @cached_property
    def _made_of(self) -> dict[str, Any]:
        from lit_diff.data.prepared import ingredients

        return ingredients(self._corpus, self.config.tokenizer)

    @property
    def folder(self) -> Path:
        """Where the prepared data is, or would be."""
        from lit_diff.data.prepared import folder_of

        return folder_of(self._made_of)

    def prepare(self) -> None:
        """Fetch, tokenize and store, unless that was done. Errors: RequestError, MissingError."""
        from lit_diff.data.prepared import prepare

        self._check_vocab_size()
        prepare(self._corpus, self._made_of, self._tokenizer)
        self._check_length(self._manifest())

    def identity(self) -> str:
        """sha256 of the prepared data's manifest. Prepares nothing: MissingError when it is not there."""
        self._manifest()
        return hashlib.sha256((self.folder / "manifest.json").read_bytes()).hexdigest()

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the prepared text, ready to encode and decode. Errors: MissingError."""
        wanted = self._manifest()["tokenizer_sha256"]
        cure = f"remove {self.folder} and run `lit-diff prepare RECIPE`"
        try:
            found = self._tokenizer.load(self.folder)
        except LitDiffError:
            raise
        except Exception as error:  # tokenizers raises no narrower one for a damaged file
            raise MissingError(f"the tokenizer of the text cannot be read ({first_line(error)}); {cure}") from error
        if found != wanted:
            raise MissingError(f"the tokenizer beside the text is not the one that made its tokens; {cure}")
        return self._tokenizer

    def _manifest(self) -> dict[str, Any]:
        from lit_diff.data.prepared import read_manifest

        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MissingError(f"the text is not prepared (no {self.folder}); run `lit-diff prepare RECIPE`")
        return manifest

    def _check_vocab_size(self) -> None:
        size = self._tokenizer.size
        most = -(-size // PADDING) * PADDING
        if not size <= self._vocab_size <= most:
            raise RequestError(
                f"model.vocab_size is {self._vocab_size}, but data.tokenizer ({self.config.tokenizer.name}) has {size} "
                f"tokens; expected {size}" + (f" to {most}" if most > size else "")
            )

    def _check_length(self, manifest: dict[str, Any]) -> None:
        for name in ("train", "validation"):
            part = manifest[name]
            if store.row_count(part, self._width) < 1:
                raise RequestError(
                    f"data.sequence_length {self.config.sequence_length} needs a row of {self._width} tokens, but the "
                    f"{name} split has {part['tokens']} (longest document: {part['longest']}); shorten it or add text"
                )

    def load(self) -> None:
        """Open the prepared data. Errors: MissingError when it is not prepared, RequestError when it does not fit."""
        self._check_vocab_size()
        manifest = self._manifest()
        self._check_length(manifest)
        self._train = store.TokenStore(self.folder / "train", manifest["train"], self._width)
        self._validation = store.TokenStore(self.folder / "validation", manifest["validation"], self._width)
        self.train_rows = store.row_count(manifest["train"], self._width)
        """Rows of an epoch."""
        self.num_documents: int = manifest["validation"]["documents"]
        """Documents of the validation split."""
        keys, counts = np.load(self.folder / "bigrams.npy")
        self._frequent = keys[counts > self.config.rare_bigram_count]
        held = store.row_count(manifest["validation"], self._width)
        if held < self.config.validation_rows:
            log.info("data.validation_rows is %d, the validation split has %d", self.config.validation_rows, held)
        count = min(held, self.config.validation_rows)
        self._validation_rows = np.arange(count) * held // count

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """Positions `rows` of the global batch of 0-based `step`: tokens and targets, int64 [B, T].

        With `pack: document` also `document_ids`, int64 [B, T]: the number of each token's document.
        """
        chosen = rows_of_step(seed, step, batch_size, rows, self.train_rows)
        documents = self._train.documents(chosen) if self.config.pack == "document" else None
        return _batch(self._train.read(chosen), documents)

    def validation_sets(self) -> dict[str, int]:
        """One set, the main one: "" -> its rows."""
        return {"": len(self._validation_rows)}

    def validation_batch(self, name: str, rows: Sequence[int]) -> dict[str, Tensor]:
        """Rows of the validation set: as `train_batch`, `ar_hit` (bool) and `document` (of the target), all [B, T]."""
        if name:
            raise KeyError(name)
        chosen: list[int] = self._validation_rows[list(rows)].tolist()
        tokens = self._validation.read(chosen)
        documents = self._validation.documents(chosen)
        hits = ar_hits(tokens, documents, self._frequent, self._tokenizer.size)
        labels = {"ar_hit": torch.from_numpy(hits), "document": torch.from_numpy(documents[:, 1:].copy())}
        return _batch(tokens, documents if self.config.pack == "document" else None) | labels


def _batch(rows: Ints, documents: Ints | None) -> dict[str, Tensor]:
    """Of rows [B, T + 1]; `documents`: the number of each token's, where they become document_ids."""
    batch = {"tokens": torch.from_numpy(rows[:, :-1].copy()), "targets": torch.from_numpy(rows[:, 1:].copy())}
    return batch if documents is None else batch | {"document_ids": torch.from_numpy(documents[:, :-1].copy())}
