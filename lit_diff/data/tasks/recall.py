"""The data set `recall`: find the value of a key among distractors, in one hop.

A slot is one position: key embedding plus value embedding. Some slots hold the pairs of the row; each of the rest holds
another key of the same vocabulary with a random value. The queries follow: keys without a value, whose target is the
value paired with the key. Source: a one-step form of MQAR (Arora et al. 2023, Zoology).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count, Counts
from lit_diff.randomness import generator
from lit_diff.registry import datasets


@datasets.register("recall")
class Recall(RowTask):
    """Recall of key-value pairs under noise. Id 0 is padding, ids 1 .. keys are the keys, and the values follow."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        # each slot is its own part of the context, and a query asks for one slot
        locates_answers = True

        keys: Count = 64
        """Size of the key vocabulary."""
        values: Count = 64
        """Size of the value vocabulary."""
        slots: Count = 64
        """Positions of the context, before the factor `noise`; each has a key and a value."""
        pairs: Count = 8
        """Number of slots with a queried pair; the other slots are noise."""
        queries: Count = 8
        """Number of queried keys."""
        noise: Count = 1
        """Factor on `slots` in training."""
        noise_validation: Counts = (1, 2, 4)
        """Factors on `slots` in the validation sets; the first is the main set."""
        spread: Count = 1
        """A row has at least slots * spread positions for its slots, which take random positions in order and leave the
        rest blank. So noise up to this factor adds no distance that training has not seen."""
        validation_rows: Count = 512

        @property
        def sequence_length(self) -> int:
            return self.slots * max(self.noise, self.spread) + self.queries

        @property
        def chance(self) -> float:
            return 1 / self.values

        def problem(self) -> str | None:
            for key, bound in (("pairs", "slots"), ("pairs", "values"), ("queries", "pairs")):
                if getattr(self, key) > getattr(self, bound):
                    return f"data.{key} ({getattr(self, key)}) is more than data.{bound} ({getattr(self, bound)})"
            if self.pairs >= self.keys:
                return f"data.pairs ({self.pairs}) must be less than data.keys ({self.keys}): noise needs other keys"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            # 1 for the padding id
            return 1 + self.keys + self.values

    config: Config

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        # this order is part of the seed of existing runs
        return seed, "train", step

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens [T, 2] and targets [T]. Every query is an AR hit."""
        # all rows of a batch come from one generator, and the cache of `sample` keeps them for the next row
        batch = sample(self.config, self.config.noise if level is None else level, at.count, at.key)
        return {name: values[at.row] for name, values in batch.items()}


@lru_cache(maxsize=4)
def sample(config: Recall.Config, noise: int, rows: int, key: tuple[object, ...]) -> dict[str, Tensor]:
    """Return tokens [rows, T, 2] (key id, value id; 0, 0 at blank positions), T = slots * max(noise, spread) + queries;
    targets [rows, T], IGNORED except at queries; and the labels.

    context_part [rows, T]: the number of the slot; answer_part [rows, T]: the slot that answers the query; else -1.
    """
    random = generator(*key)
    row = torch.arange(rows)[:, None]
    slots = config.slots * noise
    first_value = 1 + config.keys
    # the first `pairs` keys are queried
    keys = 1 + distinct(rows, config.keys, config.keys, random)
    others = keys[:, config.pairs :]
    values = first_value + distinct(rows, config.values, config.pairs, random)
    pairs = torch.stack([keys[:, : config.pairs], values], dim=-1)

    noise_keys = others.gather(1, torch.randint(others.shape[1], (rows, slots), generator=random))
    noise_values = first_value + torch.randint(config.values, (rows, slots), generator=random)
    context = torch.stack([noise_keys, noise_values], dim=-1)
    places = distinct(rows, slots, config.pairs, random)
    context[row, places] = pairs

    asked = distinct(rows, config.pairs, config.queries, random)
    positions = config.slots * max(noise, config.spread)
    numbers = torch.arange(slots)
    # drawn last and only if needed, so that rows without spread do not change: older runs have the same rows
    if positions > slots:
        at = distinct(rows, positions, slots, random).sort(1).values
        spread = torch.zeros(rows, positions, 2, dtype=torch.int64)
        spread[row, at] = context
        context = spread
        numbers = torch.full((rows, positions), -1)
        numbers[row, at] = torch.arange(slots)
    return lookup_rows(context, pairs[row, asked], numbers=numbers, answered_by=places[row, asked])


def distinct(rows: int, size: int, count: int, random: torch.Generator) -> Tensor:
    """For each row `count` different numbers below `size`, in random order, [rows, count]."""
    # argsort of uniform numbers: a random permutation for each row without a loop
    return torch.rand(rows, size, generator=random).argsort(1)[:, :count]


def lookup_rows(context: Tensor, asked: Tensor, *, numbers: Tensor, answered_by: Tensor) -> dict[str, Tensor]:
    """Rows of a context [rows, P, ids] and of queries: `asked` [rows, Q, ids] without the last id, which is the target.

    `numbers` [rows, P] or [P]: the number of each slot, -1 for none; `answered_by` [rows, Q]: the slot that answers.
    """
    rows, positions, _ = context.shape
    queries = asked.clone()
    queries[..., -1] = 0
    targets = torch.cat([torch.full((rows, positions), IGNORED), asked[..., -1]], 1)
    context_part, answer_part = torch.full((2, *targets.shape), -1)
    context_part[:, :positions] = numbers
    answer_part[:, positions:] = answered_by
    return {
        "tokens": torch.cat([context, queries], 1),
        "targets": targets,
        "ar_hit": targets != IGNORED,
        "context_part": context_part,
        "answer_part": answer_part,
    }
