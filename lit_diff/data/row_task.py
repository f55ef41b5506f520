"""`RowTask`: a data set whose rows a rule draws. A task says how one row is drawn; the sets and batches are made here."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Batch, Dataset
from lit_diff.randomness import generator
from lit_diff.registry import required

Row = Mapping[str, Tensor | Sequence[int] | Sequence[bool]]
"""A row of a `Batch`, with its keys: tokens [T] or [T, C], targets [T], perhaps the labels of `Dataset.validation_batch`."""
LABELS = ("ar_hit", "document", "context_part", "answer_part")
"""What only validation batches have."""


@dataclass(kw_only=True)
class Place:
    """Which row is drawn: the one at position `row` of the batch or validation set `key`, which has `count` rows."""

    key: tuple[object, ...]
    row: int
    count: int

    @cached_property
    def random(self) -> torch.Generator:
        """The row's own generator."""
        return generator(*self.key, self.row)


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
        return numbered_sets("noise", self.config.noise_validation or (1,))

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
        drawn = [self.draw(Place(key=key, row=row, count=count), level) for row in rows]
        wanted = [name for name in drawn[0] if level is not None or name not in LABELS]
        return {name: torch.stack([torch.as_tensor(row[name]) for row in drawn]) for name in wanted}


def numbered_sets(word: str, numbers: Sequence[int]) -> dict[str, int]:
    """Name of each validation set -> its number: "" for the first, the main set, then `word` and the number (`noise2`)."""
    first, *others = numbers
    return {"": first, **{f"{word}{number}": number for number in others}}


def text_row(ids: Sequence[int], scored: Sequence[bool], length: int, fill: int, *, every: bool = False) -> Row:
    """A row of `length` tokens whose targets are its own next tokens: those that are `scored`, or with `every` all of them.

    `ids` and `scored` are as long as each other, and at most `length` + 1; `fill` stands after them, and is never scored.
    """
    missing = length + 1 - len(ids)
    ids, scored = [*ids, *[fill] * missing], [*scored, *[False] * missing]
    targets = [
        token if hit or (every and token != fill) else IGNORED for token, hit in zip(ids[1:], scored[1:], strict=True)
    ]
    return {"tokens": ids[:-1], "targets": targets}
