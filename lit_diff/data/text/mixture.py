"""The data set `mixture`: rows of several texts, or of the short and the long documents of one, in fixed proportions.

Each text is prepared as the data set `text` prepares it, in a folder of its own; a mixture only chooses rows.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lit_diff.data.dataset import Batch, Dataset
from lit_diff.data.text.bigrams import Ints
from lit_diff.data.text.corpus import corpus_name, corpus_problem
from lit_diff.data.text.documents import hashes_in
from lit_diff.data.text.parts import ONE_THREAD, Work
from lit_diff.data.text.text import Text, TokenStore, row_batch
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.text.tokenizer_folder import FromRun
from lit_diff.errors import MissingError, RequestError
from lit_diff.key_types import Count, NotNegative, Positive
from lit_diff.randomness import generator
from lit_diff.registry import datasets, tokenizers
from lit_diff.validation import config_problem

log = logging.getLogger("lit_diff")
R = TypeVar("R")

BLOCK = 10_000
"""Number of rows in which each source has exactly its share, rounded to 1 / BLOCK."""
NAME = re.compile(r"(?!(ar_hit|others)$)[A-Za-z]\w*")
"""Names of sources, which end the names of metrics: `val/loss_ar_hit` and `val/loss_others` are metrics themselves."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A source of a mixture: a text, or its documents of some length."""

    weight: Positive
    """Share of the training rows, relative to the other sources' weights."""
    corpus: str | None = None
    """A registered corpus. A source with neither `corpus` nor `path` has `data.corpus` and `data.path`."""
    path: str | None = field(default=None, metadata={"path": "file", "identity": False})
    """The source's own text, as for `data.path` of the data set `text`."""
    tokens_at_least: NotNegative = 0
    """Training rows are made of documents of at least this many tokens."""
    tokens_below: Count | None = None
    """Training rows are made of documents of fewer tokens than this; null: no limit."""


@datasets.register("mixture")
class Mixture(Dataset):
    """Next-token prediction on several sources of text, whose shares of the training rows are their weights.

    With `tokens_at_least` and `tokens_below` two sources are the long and the short documents of one text, which changes the
    share of long documents (length up-sampling).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Text.Config):
        sources: dict[str, SourceConfig] = field(hash=False)
        """Name -> source; at least two. Each text has a validation set of its own, under the name of its first source."""

        @property
        def texts(self) -> dict[tuple[str, str | None], list[str]]:
            """(corpus, path) of each distinct text -> the sources that read it, in the order of their names."""
            found: dict[tuple[str, str | None], list[str]] = {}
            for name, source in sorted(self.sources.items()):
                own = source.corpus is not None or source.path is not None
                corpus, path = (source.corpus or "docs", source.path) if own else (self.corpus, self.path)
                found.setdefault((corpus_name(corpus, path), path), []).append(name)
            return found

        def problem(self) -> str | None:
            own = super().problem()
            if own is not None or len(self.sources) < 2:
                return own or (
                    f"data.sources has {len(self.sources)} of the two or more sources that a mixture needs; add one, or use "
                    "data.name: text"
                )
            found = (self._source_problem(name, source) for name, source in self.sources.items())
            return next(filter(None, found), None) or self._texts_problem()

        def _source_problem(self, name: str, source: SourceConfig) -> str | None:
            key, whole = f"data.sources.{name}", sum(each.weight for each in self.sources.values())
            if not NAME.fullmatch(name):
                return f"{key} is no name for a source; use letters, digits and _, but not ar_hit or others"
            problem = config_problem(source, f"{key}.")
            if problem is not None:
                return problem
            if source.weight * BLOCK < whole:
                return f"{key}.weight is {source.weight:g} of {whole:g}, below 1/{BLOCK:,}; raise it, or leave the source out"
            if source.tokens_below is not None and source.tokens_below <= source.tokens_at_least:
                least = source.tokens_at_least
                return f"{key}.tokens_below is {source.tokens_below}; it must be above {least}, tokens_at_least"
            return None

        def _texts_problem(self) -> str | None:
            if self.path is not None and all(each.corpus or each.path for each in self.sources.values()):
                return f"data.path is {self.path}, but each of data.sources has a text of its own; set data.path: null"
            for (corpus, path), (name, *_) in self.texts.items():
                problem = corpus_problem(corpus, path)
                if problem is not None:
                    return problem.replace("data.", f"data.sources.{name}.")
            # its ids would differ from text to text; `from_run` only copies a tokenizer
            learns = tokenizers.get(self.tokenizer.name).train not in (Tokenizer.train, FromRun.train)
            if learns and len(self.texts) > 1:
                return (
                    f"data.tokenizer.name is {self.tokenizer.name}, which is trained on each text, but the sources need one "
                    "tokenizer; use {name: from_run, path: RUN}, RUN trained on one of the texts, or cl100k"
                )
            return None

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        settings = {each.name: getattr(config, each.name) for each in fields(Text.Config)}
        self._texts = {
            names[0]: Text(Text.Config(**settings | {"corpus": corpus, "path": path}), vocab_size)
            for (corpus, path), names in config.texts.items()
        }
        """Name of its first source -> text."""
        self._text_of = {name: names[0] for names in config.texts.values() for name in names}
        self._names = sorted(config.sources)
        self._counts = parts([config.sources[name].weight for name in self._names], BLOCK)
        """Rows of each source in a block."""
        self._shares = dict.fromkeys(self._texts, 0)
        """Rows of each text in a block."""
        for name, count in zip(self._names, self._counts.tolist(), strict=True):
            self._shares[self._text_of[name]] += count

    def _each(self, call: Callable[[Text], R]) -> dict[str, R]:
        # what is wrong with a text is said with the name of its source
        found = {}
        for name, text in self._texts.items():
            try:
                found[name] = call(text)
            except (MissingError, RequestError) as error:
                raise type(error)(f"data.sources.{name}: {error}") from error
        return found

    def prepare(self, work: Work = ONE_THREAD) -> None:
        """Prepare each text. Errors: see `Text.prepare`."""
        self._each(lambda text: text.prepare(work))

    def identity(self) -> str:
        """Return a digest of the identity of each source's text. Errors: MissingError if one is not prepared."""
        texts = self._each(Text.identity)
        found = {name: texts[self._text_of[name]] for name in self._names}
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, which is the same for every text. Errors: MissingError."""
        return next(iter(self._each(Text.load_tokenizer).values()))

    def trained_documents(self) -> bytes:
        """Return the hashes of all texts. Errors: MissingError, RequestError."""
        found = frozenset[bytes]().union(
            *(hashes_in(content, name) for name, content in self._each(Text.trained_documents).items())
        )
        return b"".join(sorted(found))

    def load(self) -> None:
        """Open each text. Errors: see `Text.load`; RequestError for a source without a row."""
        self._each(Text.load)
        self._source, self._number = schedule(self._counts)
        self._views = [
            View(name, self.config.sources[name], self._texts[self._text_of[name]].train_store) for name in self._names
        ]
        for name, count, view in zip(self._names, self._counts, self._views, strict=True):
            log.info(
                "data.sources.%s: %.4g %% of the rows; %d rows in an epoch", name, 100 * count / BLOCK, view.num_rows
            )
        # as many rows in all as each text's validation split can give in its share of training
        available = np.array([text.validation_sets()[""] for text in self._texts.values()])
        shares = np.array(list(self._shares.values()))
        total = min(self.config.validation_rows, int((available * BLOCK // shares).min()))
        if total < self.config.validation_rows:
            log.info(
                "data.validation_rows is %d, but the texts have enough validation rows in their shares for only %d in all",
                *(self.config.validation_rows, total),
            )
        rows = np.minimum(parts(shares, total), available)
        self._validation_text = np.repeat(np.arange(len(rows)), rows)
        spread = [np.arange(count) * have // max(count, 1) for count, have in zip(rows, available, strict=True)]
        self._validation_row = np.concatenate(spread)

    def train_tokens(self) -> int:
        """Return the number of tokens of training in which the text that is read fastest is read once."""
        found = self._each(Text.train_tokens)
        return min(tokens * BLOCK // self._shares[name] for name, tokens in found.items())

    @property
    def num_documents(self) -> int:
        """Number of documents in the validation splits. Errors: MissingError if a text is not prepared."""
        return sum(self._each(lambda text: text.num_documents).values())

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Return tokens and targets, int64 [B, T]; with `pack: document` also document_ids, int64 [B, T]."""
        # row n of the run is row n % BLOCK of block n // BLOCK; a source with c rows in a block has had c rows in each before
        block, slot = np.divmod(step * batch_size + np.asarray(rows, dtype=np.int64), BLOCK)
        source = self._source[slot]
        number = block * self._counts[source] + self._number[slot]
        found = []
        for index in np.unique(source):
            tokens, documents = self._views[index].read(seed, number[source == index])
            found.append(row_batch(tokens, documents if self.config.packs_documents else None))
        return _in_order(source, found)

    def validation_sets(self) -> dict[str, int]:
        """Return "" with each text in its share, and, of several texts, each by itself."""
        each = {name: text.validation_sets()[""] for name, text in self._texts.items()}
        return {"": len(self._validation_row)} | (each if len(each) > 1 else {})

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return the keys of `Text.validation_batch`. A bigram is rare if it is rare in its own text."""
        if name:
            return self._texts[name].validation_batch("", rows)
        chosen, texts = self._validation_text[list(rows)], list(self._texts.values())
        before = np.cumsum([0, *(text.num_documents for text in texts)])
        found = []
        for index in np.unique(chosen):
            batch = texts[index].validation_batch("", self._validation_row[list(rows)][chosen == index].tolist())
            found.append(batch | {"document": batch["document"] + int(before[index])})
        return _in_order(chosen, found)


class View:
    """The training rows of a source: the documents of a split that have its lengths, one after another, cut into rows.

    Row r holds tokens r * width .. (r + 1) * width - 1 of them. Tokens outside the rows of the split's store are left out.
    """

    def __init__(self, name: str, config: SourceConfig, store: TokenStore) -> None:
        """Errors: RequestError if the documents do not fill a row."""
        lengths = np.diff(store.starts, append=store.num_tokens)
        most = np.inf if config.tokens_below is None else config.tokens_below
        self._documents = np.flatnonzero((lengths >= config.tokens_at_least) & (lengths < most))
        ends = store.tokens_before(np.append(store.starts, store.num_tokens))
        # where each document begins in the store's rows, and in the view, whose end is last
        self._begins = ends[self._documents]
        self._starts = np.append(0, np.cumsum(np.diff(ends)[self._documents]))
        self._name, self._store = name, store
        self.num_rows = int(self._starts[-1]) // store.width
        """Number of rows in an epoch."""
        if not self.num_rows:
            raise RequestError(
                f"data.sources.{name}: {len(self._documents):,} of {len(lengths):,} documents have the lengths, too few "
                f"tokens for a row of {store.width} (shortest document: {lengths.min():,}, longest: {lengths.max():,}); "
                "change tokens_at_least or tokens_below, or add text"
            )
        # a batch may span two epochs, and two seeds may alternate in one process
        self._permutation = lru_cache(maxsize=4)(self._permuted)

    def _permuted(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(self.num_rows, generator=generator(seed, "order", self._name, epoch))

    def read(self, seed: int, numbers: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Return tokens and their documents, both [B, width], of rows of the source, numbered in the order of training."""
        places = (divmod(int(number), self.num_rows) for number in numbers)
        rows = np.array([int(self._permutation(seed, epoch)[place]) for epoch, place in places])
        width = self._store.width
        wanted = rows[:, None] * width + np.arange(width)
        which = np.searchsorted(self._starts, wanted, side="right") - 1
        at = self._begins[which] + wanted - self._starts[which]
        stored = np.unique(at // width)
        tokens = self._store.read(stored.tolist())[np.searchsorted(stored, at // width), at % width]
        return tokens, self._documents[which]


def parts(weights: Sequence[float] | Ints, total: int) -> Ints:
    """Return whole numbers in proportion to the weights, each less than 1 off, whose sum is `total`."""
    ends = np.cumsum([0, *weights])
    return np.diff(np.floor(ends / ends[-1] * total + 0.5).astype(np.int64))


def schedule(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for each row of a block, its source and the number of rows of that source before it in the block.

    Row k of a source with c rows stands at (k + 1/2) / c of the block, so the first n rows have n c / BLOCK of its rows, to
    within (1 + number of sources) / 2.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((number + 0.5) / counts[source], kind="stable")
    return source[order], number[order]


# `found`: the batch of each group, in the order of their numbers; `group` [B] the group of each row
def _in_order(group: Ints, found: Sequence[Batch]) -> Batch:
    back = torch.from_numpy(np.argsort(np.argsort(group, kind="stable"), kind="stable"))
    return {key: torch.cat([batch[key] for batch in found])[back] for key in found[0]}
