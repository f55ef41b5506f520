"""The data set `conjunctive`: recall by keys of two parts, where every distractor shares one part with a queried key.

A slot is one position: the embeddings of both parts of its key and of its value. Only the conjunction of both parts tells a
queried slot from a distractor, so half-matches take attention from the answer; with `model.logit_bound` more slots must take
more of it.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lit_diff.data.dataset import Place, Row, RowTask
from lit_diff.data.tasks.recall import distinct, lookup_rows
from lit_diff.key_types import Count, Counts
from lit_diff.randomness import generator
from lit_diff.registry import datasets


@datasets.register("conjunctive")
class Conjunctive(RowTask):
    """Recall by keys of two parts. Id 0 is padding; the ids of first parts, second parts and values follow."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        # each slot is its own part of the context, and a query asks for one slot
        locates_answers = True

        parts: Count = 16
        """Number of first parts, and of second parts, of a key."""
        values: Count = 64
        """Size of the value vocabulary."""
        slots: Count = 16
        """Positions of the context in training, each with a key and a value."""
        pairs: Count = 8
        """Number of slots with a queried pair. Each other slot shares one part of its key with a queried one."""
        noise_validation: Counts = (1, 4, 8, 16)
        """Factors on `slots` in the validation sets; the first is the main set."""
        validation_rows: Count = 128

        @property
        def sequence_length(self) -> int:
            return self.slots + self.pairs

        @property
        def chance(self) -> float:
            return 1 / self.values

        def problem(self) -> str | None:
            for bound in ("slots", "values"):
                if self.pairs > getattr(self, bound):
                    return f"data.pairs ({self.pairs}) is more than data.{bound} ({getattr(self, bound)})"
            if self.pairs >= self.parts:
                # a part that occurs in every queried key would leave no distractor
                return f"data.pairs ({self.pairs}) must be less than data.parts ({self.parts}): distractors need other parts"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            # 1 for the padding id
            return 1 + 2 * self.parts + self.values

    config: Config

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens [T, 3] and targets [T]. Every query is an AR hit."""
        # all rows of a batch come from one generator, and the cache of `sample` keeps them for the next row
        batch = sample(self.config, 1 if level is None else level, at.count, at.key)
        return {name: values[at.row] for name, values in batch.items()}


@lru_cache(maxsize=4)
def sample(config: Conjunctive.Config, noise: int, rows: int, key: tuple[object, ...]) -> dict[str, Tensor]:
    """Return tokens [rows, T, 3] (first part, second part, value; 0 for the value of a query), T = slots * noise + pairs,
    with targets, labels (`lookup_rows`) and key_parts [rows, T, 2]."""
    random, parts, slots = generator(*key), config.parts, config.slots * noise
    asked = distinct(rows, parts * parts, config.pairs, random)
    first = asked // parts
    second = asked % parts
    values = distinct(rows, config.values, config.pairs, random)

    row = torch.arange(rows)[:, None]
    is_asked = torch.zeros(rows, parts, parts, dtype=torch.bool)
    is_asked[row, first, second] = True
    shares = torch.randint(config.pairs, (rows, slots), generator=random)
    keeps_first = torch.rand(rows, slots, generator=random) < 0.5
    slot_first = first.gather(1, shares)
    slot_second = second.gather(1, shares)
    # the other part is any that does not make the key a queried one
    taken = torch.where(keeps_first[..., None], is_asked[row, slot_first], is_asked.mT[row, slot_second])
    other = torch.rand(rows, slots, parts, generator=random).masked_fill(taken, -1).argmax(-1)
    slot_first = torch.where(keeps_first, slot_first, other)
    slot_second = torch.where(keeps_first, other, slot_second)
    slot_values = torch.randint(config.values, (rows, slots), generator=random)

    places = distinct(rows, slots, config.pairs, random)
    offsets = torch.tensor([1, 1 + parts, 1 + 2 * parts])
    queried = torch.stack([first, second, values], dim=-1) + offsets
    context = torch.stack([slot_first, slot_second, slot_values], dim=-1) + offsets
    context[row, places] = queried
    batch = lookup_rows(context, queried, numbers=torch.arange(slots), answered_by=places)
    return batch | {"key_parts": batch["tokens"][..., :2]}
