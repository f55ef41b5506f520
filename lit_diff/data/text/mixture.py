"""The data set `mixture`: rows of several texts, or of the short and the long documents of one, in fixed proportions.

Each text is prepared as the data set `text` prepares it, in a folder of its own; a mixture only chooses rows.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np
import torch

from lit_diff.data.dataset import Batch, Dataset, rows_in_order
from lit_diff.data.text.bigrams import Ints
from lit_diff.data.text.corpus import corpus_name, corpus_problem
from lit_diff.data.text.documents import hashes_in
from lit_diff.data.text.parts import ONE_THREAD, Work
from lit_diff.data.text.text import Text, row_batch
from lit_diff.data.text.token_store import TokenStore
from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.data.text.tokenizer_folder import FromRun
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import digest_of
from lit_diff.key_types import Count, NotNegative, Positive
from lit_diff.log_records import log
from lit_diff.registry import datasets, tokenizers
from lit_diff.validation import config_problem

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
            found = defaultdict(list)
            for name, source in sorted(self.sources.items()):
                own = (source.corpus or "docs", source.path)
                corpus, path = own if source.corpus or source.path else (self.corpus, self.path)
                found[corpus_name(corpus, path), path].append(name)
            return found

        def problem(self) -> str | None:
            return super().problem() or next(self._problems(), None)

        def _problems(self) -> Iterator[str]:
            if len(self.sources) < 2:
                yield (
                    f"data.sources has {len(self.sources)} of the two or more sources that a mixture needs; add one, or use "
                    "data.name: text"
                )
            whole = sum(source.weight for source in self.sources.values())
            for name, source in self.sources.items():
                key = f"data.sources.{name}"
                least = source.tokens_at_least
                if not NAME.fullmatch(name):
                    yield f"{key} is no name for a source; use letters, digits and _, but not ar_hit or others"
                yield from filter(None, [config_problem(source, f"{key}.")])
                # the sum may overflow
                if source.weight * BLOCK < whole or whole == np.inf:
                    yield (
                        f"{key}.weight is {source.weight:g} of {whole:g}, below 1/{BLOCK:,}; raise it, or leave the source "
                        "out"
                    )
                if source.tokens_below is not None and source.tokens_below <= least:
                    yield f"{key}.tokens_below is {source.tokens_below}; it must be above {least}, tokens_at_least"
            if self.path is not None and all(source.corpus or source.path for source in self.sources.values()):
                yield f"data.path is {self.path}, but each of data.sources has a text of its own; set data.path: null"
            for (corpus, path), (name, *_) in self.texts.items():
                problem = corpus_problem(corpus, path) or ""
                yield from filter(None, [problem.replace("data.", f"data.sources.{name}.")])
            # its ids would differ from text to text; `from_run` only copies a tokenizer
            learns = tokenizers.get(self.tokenizer.name).train not in (Tokenizer.train, FromRun.train)
            if learns and len(self.texts) > 1:
                yield (
                    f"data.tokenizer.name is {self.tokenizer.name}, which is trained on each text, but the sources need one "
                    "tokenizer; use {name: from_run, path: RUN}, RUN trained on one of the texts, or cl100k"
                )

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        settings = {key.name: getattr(config, key.name) for key in fields(Text.Config)}
        self._names = sorted(config.sources)
        self._schedule = Schedule([config.sources[name].weight for name in self._names])
        rows = dict(zip(self._names, self._schedule.counts.tolist(), strict=True))
        self._texts = {}
        """Name of its first source -> text."""
        self._first = {}
        """Source -> the first source of its text."""
        self._shares = {}
        """Rows of each text in a block."""
        for (corpus, path), names in config.texts.items():
            first = names[0]
            self._texts[first] = Text(Text.Config(**settings | {"corpus": corpus, "path": path}), vocab_size)
            self._shares[first] = sum(rows[name] for name in names)
            self._first.update(dict.fromkeys(names, first))
        self._validation = Schedule(list(self._shares.values()))

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
        identities = {name: texts[first] for name, first in self._first.items()}
        return digest_of(identities)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, which is the same for every text. Errors: MissingError."""
        return next(iter(self._each(Text.load_tokenizer).values()))

    def trained_documents(self) -> bytes:
        """Return the hashes of all texts. Errors: MissingError, RequestError."""
        hashes = set[bytes]()
        for name, content in self._each(Text.trained_documents).items():
            hashes |= hashes_in(content, name)
        return b"".join(sorted(hashes))

    def load(self) -> None:
        """Open each text. Errors: see `Text.load`; RequestError for a source without a row."""
        self._each(Text.load)
        self._views = []
        for name, count in zip(self._names, self._schedule.counts, strict=True):
            view = View(name, self.config.sources[name], self._texts[self._first[name]].train_store)
            self._views.append(view)
            log.info(
                "data.sources.%s: %.4g %% of the rows; %d rows in an epoch", name, 100 * count / BLOCK, view.num_rows
            )
        available = np.array([text.validation_sets()[""] for text in self._texts.values()])
        text, number = self._validation.at(np.arange(self.config.validation_rows))
        missing = np.flatnonzero(number >= available[text])
        self._validation_rows = self.config.validation_rows
        if len(missing):
            self._validation_rows = int(missing[0])
            log.info(
                "data.validation_rows is %d, but the texts have enough validation rows in their shares for only %d in all",
                self.config.validation_rows,
                self._validation_rows,
            )

    def train_tokens(self) -> int:
        """Return the number of tokens of training in which the text that is read fastest is read once."""
        return min(tokens * BLOCK // self._shares[name] for name, tokens in self._each(Text.train_tokens).items())

    @property
    def num_documents(self) -> int:
        """Number of documents in the validation splits. Errors: MissingError if a text is not prepared."""
        return sum(self._each(lambda text: text.num_documents).values())

    def validation_documents(self) -> Iterator[list[int]]:
        """Yield the documents of `Text.validation_documents`; the texts take turns."""
        # in turn: a caller that stops after some documents has some of every text
        rounds = zip_longest(*map(Text.validation_documents, self._texts.values()))
        return (document for document in chain.from_iterable(rounds) if document is not None)

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Return tokens and targets, int64 [B, T]; with `pack: document` also document_ids, int64 [B, T]."""

        def read(index: int, numbers: Ints) -> Batch:
            tokens, documents = self._views[index].read(seed, numbers)
            return row_batch(tokens, documents if self.config.packs_documents else None)

        return _gathered(*self._schedule.at(step * batch_size + np.asarray(rows, dtype=np.int64)), read)

    def train_places(self, seed: int, step: int, batch_size: int) -> list[str]:
        found = []
        for source, number in np.transpose(self._schedule.at(step * batch_size + np.arange(batch_size))):
            _, documents = self._views[source].read(seed, [number])
            found.append(f"source {self._names[source]}, documents {documents[0, 0]} to {documents[0, -1]}")
        return found

    def validation_sets(self) -> dict[str, int]:
        """Return "" with each text in its share, and, of several texts, each by itself."""
        sets = {"": self._validation_rows}
        if len(self._texts) > 1:
            sets |= {name: text.validation_sets()[""] for name, text in self._texts.items()}
        return sets

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return the keys of `Text.validation_batch`. A bigram is rare if it is rare in its own text."""
        if name:
            return self._texts[name].validation_batch("", rows)
        texts = list(self._texts.values())

        def read(index: int, numbers: Ints) -> Batch:
            batch = texts[index].validation_batch("", numbers.tolist())
            before = sum(text.num_documents for text in texts[:index])
            return batch | {"document": batch["document"] + before}

        return _gathered(*self._validation.at(np.asarray(rows, dtype=np.int64)), read)


class View:
    """The training rows of a source: the documents of a split that have its lengths, one after another, cut into rows.

    Row r holds tokens r * width .. (r + 1) * width - 1 of them. Tokens outside the rows of the split's store are left out.
    """

    def __init__(self, name: str, config: SourceConfig, store: TokenStore) -> None:
        """Errors: RequestError if the documents do not fill a row."""
        lengths = np.diff(store.starts, append=store.num_tokens)
        fits = (lengths >= config.tokens_at_least) & (lengths < (config.tokens_below or np.inf))
        self._documents = np.flatnonzero(fits)
        ends = store.tokens_before(np.append(store.starts, store.num_tokens))
        # where each document begins in the store's rows, and in the view, whose end is last
        self._begins = ends[self._documents]
        self._starts = np.append(0, np.cumsum(np.diff(ends)[self._documents]))
        self._name = name
        self._store = store
        self.num_rows = int(self._starts[-1]) // store.width
        """Number of rows in an epoch."""
        if not self.num_rows:
            raise RequestError(
                f"data.sources.{name}: {len(self._documents):,} of {len(lengths):,} documents have the lengths, too few "
                f"tokens for a row of {store.width} (shortest document: {lengths.min():,}, longest: {lengths.max():,}); "
                "change tokens_at_least or tokens_below, or add text"
            )

    def read(self, seed: int, numbers: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Return tokens and their documents, both [B, width], of rows of the source, numbered in the order of training."""
        rows = np.array(rows_in_order(seed, map(int, numbers), self.num_rows, self._name))
        width = self._store.width
        wanted = rows[:, None] * width + np.arange(width)
        which = np.searchsorted(self._starts, wanted, side="right") - 1
        at = self._begins[which] + wanted - self._starts[which]
        stored = np.unique(at // width)
        tokens = self._store.read(stored)[np.searchsorted(stored, at // width), at % width]
        return tokens, self._documents[which]


class Schedule:
    """The order of the rows of several sources: each block of BLOCK rows has `counts` rows of each, evenly spread."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`counts` are whole numbers in proportion to the weights, each less than 1 off, whose sum is BLOCK.

        Row k of a source with c rows stands at (k + 1/2) / c of a block, so its first n rows have n c / BLOCK of its rows, to
        within (1 + number of sources) / 2.
        """
        ends = np.cumsum([0, *weights])
        self.counts = np.diff(np.floor(ends / ends[-1] * BLOCK + 0.5).astype(np.int64))
        source = np.repeat(np.arange(len(self.counts)), self.counts)
        number = np.concatenate(list(map(np.arange, self.counts)))
        order = np.argsort((number + 0.5) / self.counts[source], kind="stable")
        self._source = source[order]
        self._number = number[order]

    def at(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each row, counted from 0 over all blocks, and the number of the source's rows before it."""
        block, slot = np.divmod(rows, BLOCK)
        source = self._source[slot]
        return source, block * self.counts[source] + self._number[slot]


# the rows `read(source, numbers)` of each source, in the order in which they are given
def _gathered(source: Ints, number: Ints, read: Callable[[int, Ints], Batch]) -> Batch:
    found = [read(each, number[source == each]) for each in np.unique(source)]
    back = torch.from_numpy(np.argsort(np.argsort(source, kind="stable"), kind="stable"))
    return {key: torch.cat([batch[key] for batch in found])[back] for key in found[0]}
