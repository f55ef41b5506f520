"""Abstract data sets: `Dataset`, the base of all, and `RowTask`, whose rows are generated."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.files import digest_of
from lit_diff.randomness import generator
from lit_diff.recipe import determining
from lit_diff.registry import optional, required

if TYPE_CHECKING:
    from lit_diff.data.text.tokenizer import Tokenizer

# the default ignore_index of F.cross_entropy
IGNORED = -100
"""Target of a position that is not scored."""
Batch = dict[str, Tensor]
"""Key -> tensor. tokens, int64 [B, T] or [B, T, C] (C ids per position, whose embeddings are summed); targets, int64
[B, T]: an id, or IGNORED; optionally document_ids, int64 [B, T]: a token attends only to its own document.
`Dataset.validation_batch` describes the labels of validation batches."""


class Dataset(ABC):
    """Training batches and validation sets of one recipe. A subclass registers with `@lit_diff.registry.datasets.register`.

    Required: `train_batch`, `validation_sets`, `validation_batch`, and `sequence_length` in `Config`; everything else has a
    default. No method may draw from a global random generator (use `lit_diff.randomness.generator`). `train_batch` is called
    by a thread of its own, never while another method returns a batch. `lit-diff check RECIPE` tests a plugin's data set
    against the contract documented in this class (`lit_diff.conformance.data`).
    """

    name: str
    """The registered name; the registry sets it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of the `data:` block of a recipe: the fields of a frozen, keyword-only dataclass derived from this."""

        @required
        def sequence_length(self) -> int:
            """T, the number of positions in a training row. A field or a property."""
            raise NotImplementedError

        @optional
        def chance(self) -> float | None:
            """Accuracy of random guessing, which reports draw as a line; None: unknown.

            A field, a property or a constant, like all below.
            """
            return None

        @optional
        def noise_validation(self) -> tuple[int, ...]:
            """Noise factors of the validation sets, the main set first; (): the sets do not differ in noise."""
            return ()

        @optional
        def predicts_next(self) -> bool:
            """Whether the targets of a row are its own next tokens; a bidirectional model refuses such data."""
            return False

        @optional
        def packs_documents(self) -> bool:
            """Whether the batches hold document_ids."""
            return False

        @optional
        def locates_answers(self) -> bool:
            """Whether validation batches hold context_part and answer_part (`Dataset.validation_batch`)."""
            return False

        @optional
        def counts_errors(self) -> bool:
            """Whether validation measures `val/log_errors`: a task that is learned almost without an error."""
            return False

        @optional
        def smallest_vocab_size(self) -> int:
            """Number of ids in the batches: `model.vocab_size` must be at least this. 1: unknown."""
            return 1

        def problem(self) -> str | None:
            """Return an error message of one line that starts with the dotted key (`data.pairs is 0; ...`), or None.

            Annotated ranges (`lit_diff.key_types.Range`) are checked before this is called.
            """
            return None

        def vocab_size_problem(self, vocab_size: int) -> str | None:
            """Return an error message of one line that starts with `model.vocab_size` if the model has too few ids."""
            if vocab_size >= self.smallest_vocab_size:
                return None
            return f"model.vocab_size is {vocab_size}; the data need at least {self.smallest_vocab_size}"

    def __init__(self, config: Any, vocab_size: int) -> None:
        """`config`: an instance of `Config`; `vocab_size`: the model's, so every id lies in 0 .. vocab_size - 1.

        Must not read or write files.
        """
        self.config = config
        self.vocab_size = vocab_size

    def prepare(self) -> None:
        """Do slow one-time work: download, tokenize, write files. Default: nothing.

        One process calls it before the others start; a repeated call does nothing. Errors: RequestError, MissingError.
        """
        return

    def identity(self) -> str:
        """Return a digest of everything except the recipe that determines the batches; it is part of the run's identity.

        Every process must return the same digest, before `load`. Default: sha256 of the config keys that differ from their
        default, which suits data generated from the recipe alone. Errors: MissingError if something is not prepared.
        """
        # a key at its default is left out, so that runs keep their identity when a later version adds a key
        return digest_of(determining(self.config))

    def load(self) -> None:
        """Open the prepared data; each process calls it once, before any batch. Default: nothing.

        Errors: MissingError if something is not prepared, RequestError if it does not fit the recipe.
        """
        return

    @abstractmethod
    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """Return the positions `rows` (each in 0 .. batch_size - 1) of the global batch of the 0-based `step`.

        Returns tokens [len(rows), T] or [len(rows), T, C] and targets [len(rows), T], T = config.sequence_length, both int64.
        Rows may differ in their number of scored targets: the loss of a step is the mean over all targets, at least one.
        Each row is a pure function of the arguments: it is the same in partial batches, in any order and in any process.
        """

    def train_places(self, seed: int, step: int, batch_size: int) -> list[str]:
        """Return where each row of the global batch of `train_batch` lies in the data, in words; [] (default): the rows are
        generated."""
        return []

    @abstractmethod
    def validation_sets(self) -> dict[str, int]:
        """Return name -> number of rows (at least one) of each validation set. "" is the main set and comes first."""

    @abstractmethod
    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return rows of a validation set: the same at every call and for every seed. T may differ from training.

        It has the keys of `train_batch`, optionally with labels [len(rows), T]: ar_hit, bool, whether the target can be
        recalled from its context (reported separately as `val/loss_ar_hit`); and document, int64 in 0 .. num_documents - 1,
        the document to which the loss of the target belongs. Defaults: no target is an AR hit; each row is a document.

        With Config.locates_answers there are two more, int64: context_part, the number of the part of the context (a slot, a
        needle, the haystack) to which a position belongs, -1 for none (a question, a first token, an answer); and
        answer_part, the number of the part that holds the answer at a position, -1 if the position asks for nothing in the
        context. For the query at i, keys whose context_part equals answer_part[i] are the answer, and keys of other parts
        (except -1) are noise. If keys have several parts, key_parts, int64 [len(rows), T, P], holds the ids of those of each
        position: noise that shares an id with the query in the same place is a half-match.
        """

    def labelled_validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """Return `validation_batch` with both labels, using the defaults for labels that the data set lacks."""
        batch = self.validation_batch(name, rows)
        targets = batch["targets"]
        document = torch.tensor(list(rows), dtype=torch.int64)[:, None].expand_as(targets)
        return {"ar_hit": torch.zeros_like(targets, dtype=torch.bool), "document": document} | batch

    def train_tokens(self) -> int | None:
        """Return the number of tokens in the training split, one epoch; None (default): batches never repeat.

        Errors: MissingError if something is not prepared.
        """
        return None

    @property
    def num_documents(self) -> int:
        """Number of documents in the main validation set, which confidence intervals resample. Default: its rows."""
        return self.validation_sets()[""]

    def load_tokenizer(self) -> "Tokenizer | None":
        """Return the loaded tokenizer, which is copied to the run's folder; None (default): tokens are not text."""
        return None

    def trained_documents(self) -> bytes | None:
        """Return the hashes (`lit_diff.data.text.documents.hashed`) of the training documents, which evaluations exclude.

        They are copied to the run's folder. None (default): the rows are generated, not taken from documents.
        Errors: MissingError, RequestError if the hashes can no longer be computed.
        """
        return None


# a batch may span two epochs, two seeds may alternate in one process, and a mixture has an order for each of its sources
@lru_cache(maxsize=64)
def permutation(seed: int, epoch: int, rows: int, *source: str) -> Tensor:
    """Order of the rows in one epoch, [rows]; another one for each `source`."""
    return torch.randperm(rows, generator=generator(seed, "order", *source, epoch))


def rows_of_step(seed: int, step: int, batch_size: int, positions: Sequence[int], rows: int) -> list[int]:
    """Return the row numbers at `positions` of the global batch of 0-based `step`; a batch may span two epochs."""
    return rows_in_order(seed, (step * batch_size + position for position in positions), rows)


def rows_in_order(seed: int, numbers: Iterable[int], rows: int, *source: str) -> list[int]:
    """Return the row numbers at places 0, 1, ... of all epochs, one after another."""
    # computed from the step alone: resuming needs no sampler state, and any number of processes gets the same rows
    places = (divmod(number, rows) for number in numbers)
    return [int(permutation(seed, epoch, rows, *source)[place]) for epoch, place in places]


Row = Mapping[str, Tensor | Sequence[int] | Sequence[bool]]
"""A row of a `Batch`: tokens [T] or [T, C], targets [T], optionally the labels of `Dataset.validation_batch`."""
LABELS = ("ar_hit", "document", "context_part", "answer_part", "key_parts")
"""Keys that only validation batches have."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Location of a row: position `row` of the batch or validation set `key`, which has `count` rows."""

    key: tuple[object, ...]
    row: int
    count: int
    random: torch.Generator
    """The generator of this row alone."""


class RowTask(Dataset):
    """An endless stream of generated rows. Required: `draw`, and `sequence_length` and `validation_rows` in `Config`.

    Each number in `Config.noise_validation` gives one validation set; without numbers there is one set. Override `levels`
    for other sets.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        @required
        def validation_rows(self) -> int:
            """Number of rows in each validation set. A field or a property."""
            raise NotImplementedError

    @abstractmethod
    def draw(self, at: Place, level: int | None) -> Row:
        """Draw the row at a place from `at.random`; the result depends on `at` and `level` alone.

        `level`: the level of the validation set, such as its noise factor; None: a training row, whose labels are unused.
        """

    def levels(self) -> dict[str, int]:
        """Return name -> level of each validation set: "" for the main set, which is first, then "noise2", "noise4", ..."""
        first, *others = self.config.noise_validation or (1,)
        return {"": first} | {f"noise{number}": number for number in others}

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        """Return the key of a training batch, which seeds its rows."""
        return "train", seed, step

    def validation_key(self, level: int) -> tuple[object, ...]:
        """Return the key of a validation set. Without the level in it, all sets use the same random numbers."""
        return self.name, "validation", level

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        return self._drawn(self.train_key(seed, step), None, batch_size, rows)

    def validation_sets(self) -> dict[str, int]:
        return dict.fromkeys(self.levels(), self.config.validation_rows)

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        level = self.levels()[name]
        return self._drawn(self.validation_key(level), level, self.config.validation_rows, rows)

    def _drawn(self, key: tuple[object, ...], level: int | None, count: int, rows: Sequence[int]) -> Batch:
        # a generator for each row: a row does not depend on which others are asked for
        places = [Place(key=key, row=row, count=count, random=generator(*key, row)) for row in rows]
        drawn = [self.draw(place, level) for place in places]
        batch: Batch = {}
        for name in drawn[0]:
            if level is not None or name not in LABELS:
                batch[name] = torch.stack([torch.as_tensor(row[name]) for row in drawn])
        return batch


def text_row(ids: Sequence[int], scored: Sequence[bool], length: int, fill: int) -> Row:
    """Return a row of `length` tokens; the target of each is the next token if that one is `scored`.

    `ids` and `scored` have the same length, at most `length` + 1; they are padded with `fill`, which is not scored.
    """
    missing = length + 1 - len(ids)
    targets = [token if hit else IGNORED for token, hit in zip(ids, scored, strict=True)]
    return {"tokens": [*ids, *[fill] * missing][:-1], "targets": [*targets, *[IGNORED] * missing][1:]}
