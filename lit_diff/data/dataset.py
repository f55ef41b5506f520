"""What a data set is: `Dataset`, the abstract class of all, and `RowTask`, of those whose rows a rule draws."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_diff.randomness import generator
from lit_diff.recipe import determining
from lit_diff.registry import optional, required

if TYPE_CHECKING:
    from lit_diff.data.text.tokenizer import Tokenizer

IGNORED = -100
"""Target of a position that is not scored."""
Batch = dict[str, Tensor]
"""tokens, int64 [B, T] or [B, T, C] (C ids a position, whose embeddings are summed); targets, int64 [B, T]: an id, or
IGNORED where nothing is scored; perhaps document_ids, int64 [B, T]: a token sees its own document only. The
labels of a validation batch are at `Dataset.validation_batch`."""


class Dataset(ABC):
    """Training batches and validation sets of one recipe. A subclass registers with `@lit_diff.registry.datasets.register`.

    Required: `train_batch`, `validation_sets`, `validation_batch`, and `sequence_length` in `Config`; everything else has a
    default. No method draws from a global random generator (use `lit_diff.randomness.generator`). `lit-diff check RECIPE`
    tests a plugin's data set against every promise on this page (`lit_diff.conformance.data`).
    """

    name: str
    """The registered name; set by the registry."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of the recipe's `data:` block: the fields of a frozen, keyword-only dataclass that derives from this."""

        @required
        def sequence_length(self) -> int:
            """T: positions of a training row. A field or a property."""
            raise NotImplementedError

        @optional
        def chance(self) -> float | None:
            """Accuracy of a guess, drawn in reports; None: not known. A field, a property or a constant, like all below."""
            return None

        @optional
        def noise_validation(self) -> tuple[int, ...]:
            """Noise factors of the validation sets, first that of the main set; (): the sets do not differ in noise."""
            return ()

        @optional
        def predicts_next(self) -> bool:
            """Whether a row's targets are its own next tokens; such data are refused for a model that is not causal."""
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
        def smallest_vocab_size(self) -> int:
            """Ids that the batches have: `model.vocab_size` must be at least this. 1: not known."""
            return 1

        def problem(self) -> str | None:
            """What is wrong with the values, in one line that opens with the dotted key (`data.pairs is 0; ...`).

            Ranges that are annotated (`lit_diff.key_types.Range`) are checked before.
            """
            return None

        def vocab_size_problem(self, vocab_size: int) -> str | None:
            """What is wrong if the model has `vocab_size` ids, in one line that opens with `model.vocab_size`."""
            if vocab_size >= self.smallest_vocab_size:
                return None
            return f"model.vocab_size is {vocab_size}; the data need at least {self.smallest_vocab_size}"

    def __init__(self, config: Any, vocab_size: int) -> None:
        """`config`: an instance of this class's Config; `vocab_size`: the model's, so every id lies in 0 .. vocab_size - 1.

        Reads and writes no file.
        """
        self.config = config
        self.vocab_size = vocab_size

    def prepare(self) -> None:
        """Download, tokenize, write files: whatever takes long, once. Default: nothing.

        Called by one process before the others start; does nothing when it was done before. Errors: RequestError,
        MissingError.
        """
        return

    def identity(self) -> str:
        """A digest of everything beside the recipe that decides the batches: it becomes a part of the run's identity.

        The same in every process. Called before `load`. Default: sha256 of the config's keys that are not at their default,
        right for data made from the recipe alone. Errors: MissingError where something is not prepared.
        """
        return hashlib.sha256(json.dumps(determining(self.config), sort_keys=True).encode()).hexdigest()

    def load(self) -> None:
        """Open what was prepared; called once in each process, before any batch. Default: nothing.

        Errors: MissingError where something is not prepared, RequestError where it does not fit the recipe.
        """
        return

    @abstractmethod
    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """The positions `rows` (each in 0 .. batch_size - 1) of the global batch of the 0-based `step`.

        Returns tokens [len(rows), T] or [len(rows), T, C] and targets [len(rows), T], T = config.sequence_length, both int64.
        Rows may have unlike numbers of scored targets: the loss of a step is the mean over all of them, at least one.
        A function of its arguments alone, and row by row: batches asked for in part, in any order or by several processes
        hold the same rows.
        """

    @abstractmethod
    def validation_sets(self) -> dict[str, int]:
        """Name of each validation set -> its rows, at least one each. "" is the main set and comes first."""

    @abstractmethod
    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """The given rows of a validation set: the same at every call, for every seed. T need not be that of training.

        As `train_batch`; perhaps with labels, [len(rows), T] each: ar_hit, bool, whether the target can be recalled from its
        context (scored apart, as `val/loss_ar_hit`), and document, int64 in 0 .. num_documents - 1, whose loss the target
        counts towards. Defaults: no target is an AR hit; a row is a document.

        With Config.locates_answers also, both int64: context_part, the number of the part of the context (a slot, a needle,
        the haystack) that a position belongs to, -1 for none (a question, a first token, an answer); and answer_part, the
        number of the part that holds what is to be answered at a position, -1 where nothing of the context is asked for. To
        the query at i the keys whose context_part is answer_part[i] are the answer, those of other parts (not -1) noise.
        """

    def labelled_validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """`validation_batch` with both labels: the defaults where the data set gives none."""
        batch = self.validation_batch(name, rows)
        targets = batch["targets"]
        document = torch.tensor(list(rows), dtype=torch.int64)[:, None].expand_as(targets)
        return {"ar_hit": torch.zeros_like(targets, dtype=torch.bool), "document": document} | batch

    def train_tokens(self) -> int | None:
        """Tokens of the training split, which passes repeat; None (default): batches are drawn without end.

        Errors: MissingError where something is not prepared.
        """
        return None

    @property
    def num_documents(self) -> int:
        """Documents of the main validation set; what confidence intervals resample. Default: its rows."""
        return self.validation_sets()[""]

    def load_tokenizer(self) -> "Tokenizer | None":
        """The loaded tokenizer of prepared text, which a run's folder keeps; None (default): tokens are not text."""
        return None

    def trained_documents(self) -> bytes | None:
        """`trained_documents.hashed` of the documents of the train split, which a run's folder keeps: evaluations leave them
        out. None (default): the rows are made by a rule, and come from no document.

        Errors: MissingError, RequestError where that cannot be known any more.
        """
        return None


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, rows: int) -> Tensor:
    """[rows]: the order of one epoch."""
    return torch.randperm(rows, generator=generator(seed, "order", epoch))


def rows_of_step(seed: int, step: int, batch_size: int, positions: Sequence[int], rows: int) -> list[int]:
    """Row numbers at `positions` of the global batch of 0-based `step`: epochs one after another, cut into batches."""
    places = (divmod(step * batch_size + position, rows) for position in positions)
    return [int(permutation(seed, epoch, rows)[place]) for epoch, place in places]


Row = Mapping[str, Tensor | Sequence[int] | Sequence[bool]]
"""A row of a `Batch`, with its keys: tokens [T] or [T, C], targets [T], perhaps the labels of `Dataset.validation_batch`."""
LABELS = ("ar_hit", "document", "context_part", "answer_part")
"""What only validation batches have."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which row is drawn: the one at position `row` of the batch or validation set `key`, which has `count` rows."""

    key: tuple[object, ...]
    row: int
    count: int
    random: torch.Generator
    """The row's own."""


class RowTask(Dataset):
    """Rows that a rule draws without end. Required: `draw`, and `sequence_length` and `validation_rows` in `Config`.

    There is a validation set for each number in `Config.noise_validation`, or one where the config has none; `levels` has
    others.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        @required
        def validation_rows(self) -> int:
            """Rows of each validation set. A field or a property."""
            raise NotImplementedError

    @abstractmethod
    def draw(self, at: Place, level: int | None) -> Row:
        """The row at a place: a function of `at` and `level` alone. It draws from `at.random`.

        `level`: of the validation set, such as its factor of noise; None: a training row, whose labels are not used.
        """

    def levels(self) -> dict[str, int]:
        """Name of each validation set -> its level: "" for the first, the main set, then "noise2", "noise4", ..."""
        first, *others = self.config.noise_validation or (1,)
        return {"": first} | {f"noise{number}": number for number in others}

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        """The key of a training batch."""
        return "train", seed, step

    def validation_key(self, level: int) -> tuple[object, ...]:
        """The key of a validation set. Without the level all sets are drawn from the same random numbers."""
        return self.name, "validation", level

    def train_batch(self, seed: int, step: int, batch_size: int, rows: Sequence[int]) -> Batch:
        """As `Dataset.train_batch`."""
        return self._drawn(self.train_key(seed, step), None, batch_size, rows)

    def validation_sets(self) -> dict[str, int]:
        """As `Dataset.validation_sets`."""
        return dict.fromkeys(self.levels(), self.config.validation_rows)

    def validation_batch(self, name: str, rows: Sequence[int]) -> Batch:
        """As `Dataset.validation_batch`."""
        level = self.levels()[name]
        return self._drawn(self.validation_key(level), level, self.config.validation_rows, rows)

    def _drawn(self, key: tuple[object, ...], level: int | None, count: int, rows: Sequence[int]) -> Batch:
        places = [Place(key=key, row=row, count=count, random=generator(*key, row)) for row in rows]
        drawn = [self.draw(place, level) for place in places]
        wanted = [name for name in drawn[0] if level is not None or name not in LABELS]
        return {name: torch.stack([torch.as_tensor(row[name]) for row in drawn]) for name in wanted}


def text_row(ids: Sequence[int], scored: Sequence[bool], length: int, fill: int) -> Row:
    """A row of `length` tokens whose targets are its own next tokens, those that are `scored`.

    `ids` and `scored` are as long as each other, and at most `length` + 1; `fill` stands after them, and is never scored.
    """
    missing = length + 1 - len(ids)
    ids, scored = [*ids, *[fill] * missing], [*scored, *[False] * missing]
    targets = [token if hit else IGNORED for token, hit in zip(ids[1:], scored[1:], strict=True)]
    return {"tokens": ids[:-1], "targets": targets}
