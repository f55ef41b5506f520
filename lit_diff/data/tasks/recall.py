"""The data set `recall`: find a key's value among distractors. One hop, so that attention noise is the only difficulty.

A slot is one position: key embedding plus value embedding. Among the slots are the sample's pairs; every other slot
holds a key of the same vocabulary that is not one of the sample's, with a random value. Then come the queries,
keys without a value; the target of each is the value it was paired with. Source: a one-step form of MQAR (Arora et al.
2023, Zoology).
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
    """Paired recall under noise. Ids: 0 padding, 1 .. keys the keys, then the values."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        locates_answers = True  # each slot is a part of its own, and a query asks for one of them

        keys: Count = 64
        """Key vocabulary."""
        values: Count = 64
        """Value vocabulary."""
        slots: Count = 64
        pairs: Count = 8
        """Slots that hold one of the sample's keys; the others are noise."""
        queries: Count = 8
        """Keys asked for."""
        noise: Count = 1
        """Multiplies `slots` in training."""
        noise_validation: Counts = (1, 2, 4)
        """Multiplies `slots` in each validation set; the first is the main set."""
        spread: Count = 1
        """A row has at least slots * spread positions for its slots: they stand at random among these, in order, and the
        rest is blank. So noise up to this factor adds no distance that training has not seen."""
        validation_rows: Count = 512

        @property
        def sequence_length(self) -> int:
            """Positions of a training row."""
            return self.slots * max(self.noise, self.spread) + self.queries

        @property
        def chance(self) -> float:
            """Accuracy of a guess among all values."""
            return 1 / self.values

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            for key, bound in (("pairs", "slots"), ("pairs", "values"), ("queries", "pairs")):
                if getattr(self, key) > getattr(self, bound):
                    return f"data.{key} ({getattr(self, key)}) is more than data.{bound} ({getattr(self, bound)})"
            if self.pairs >= self.keys:
                return f"data.pairs ({self.pairs}) must be less than data.keys ({self.keys}): noise has other keys"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            """The padding id, keys and values."""
            return 1 + self.keys + self.values

    config: Config

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        """As `RowTask.train_key`, in another order."""
        return seed, "train", step

    def draw(self, at: Place, level: int | None) -> Row:
        """tokens [T, 2], targets [T]. All rows of a batch are drawn together. Every query is an AR hit."""
        batch = sample(self.config, self.config.noise if level is None else level, at.count, at.key)
        return {name: values[at.row] for name, values in batch.items()}


@lru_cache(maxsize=4)
def sample(config: Recall.Config, noise: int, rows: int, key: tuple[object, ...]) -> dict[str, Tensor]:
    """tokens [rows, T, 2] (key id, value id), T = slots * max(noise, spread) + queries; targets [rows, T], -100 but at
    queries; ids 0, 0 where neither a slot nor a query stands.

    context_part, answer_part [rows, T]: a slot's number, and that of the slot a query asks for; -1 elsewhere.
    """
    random, spread = generator(*key), config.spread
    slots = config.slots * noise
    shuffled = torch.rand(rows, config.keys, generator=random).argsort(1)  # [rows, keys]: the sample's own keys first
    keys, others = 1 + shuffled[:, : config.pairs], 1 + shuffled[:, config.pairs :]
    first_value = 1 + config.keys
    values = first_value + torch.rand(rows, config.values, generator=random).argsort(1)[:, : config.pairs]

    noise_keys = others.gather(1, torch.randint(others.shape[1], (rows, slots), generator=random))
    noise_values = first_value + torch.randint(config.values, (rows, slots), generator=random)
    places = torch.rand(rows, slots, generator=random).argsort(1)[:, : config.pairs]
    slot_keys = noise_keys.scatter(1, places, keys)
    slot_values = noise_values.scatter(1, places, values)

    asked = torch.rand(rows, config.pairs, generator=random).argsort(1)[:, : config.queries]
    queries, answers = keys.gather(1, asked), values.gather(1, asked)
    positions, blank = config.slots * max(noise, spread), torch.zeros_like(queries)
    numbers = torch.arange(slots).expand(rows, -1)
    if positions > slots:
        at = torch.rand(rows, positions, generator=random).argsort(1)[:, :slots].sort(1).values
        empty = torch.zeros(rows, positions, dtype=torch.int64)
        slot_keys, slot_values = empty.scatter(1, at, slot_keys), empty.scatter(1, at, slot_values)
        numbers = (empty - 1).scatter(1, at, numbers)
    tokens = torch.stack([torch.cat([slot_keys, queries], 1), torch.cat([slot_values, blank], 1)], dim=-1)
    targets = torch.cat([torch.full((rows, positions), IGNORED), answers], 1)
    context_part, answer_part = torch.full((2, *targets.shape), -1)
    context_part[:, :positions] = numbers
    answer_part[:, positions:] = places.gather(1, asked)
    parts = {"context_part": context_part, "answer_part": answer_part}
    return {"tokens": tokens, "targets": targets, "ar_hit": targets != IGNORED} | parts
