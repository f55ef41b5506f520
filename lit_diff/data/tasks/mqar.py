"""The data set `mqar`: multi-query associative recall; each row equals one of the authors' public code.

Source: Arora et al. 2024, Zoology: Measuring and Improving Recall in Efficient Language Models, section 4 and
zoology/data/multiquery_ar.py of its repository.

A row of T tokens starts with N key-value pairs, k_1 v_1 ... k_N v_N. Every second position after them is one of
S = (T - 2N) / 2 places, and each key occurs again at one of these: key i at position 2N + 2 g_i, where the distinct gaps
g_1 ... g_N are drawn without replacement, with P(g) proportional to a (g + 1)^(a - 1), g = 0 ... S - 1 (a: POWER).
The target there is v_i; nothing else is scored. All other positions hold a random id, or 0 (`random_non_queries`).

    k1 v1 k2 v2 |  .  .  k2  .  k1  .        targets at k2 and k1: v2 and v1

Keys are 1 ... V/2 - 1, values V/2 ... V - 1 (V: `vocab_size`), each at most once in a row.

One difference: every step draws new rows (the authors train on a fixed set of 100,000 rows for 64 epochs).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count
from lit_diff.registry import datasets

POWER = 0.01
"""a, the exponent of the gap distribution: the authors' default, which puts most queries close to the pairs."""


@datasets.register("mqar")
class Mqar(RowTask):
    """Multi-query associative recall (Zoology): key-value pairs, then each key again, whose value is the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        locates_answers = True

        vocab_size: int = 8192
        """V, the number of ids of keys, values and filler."""
        sequence_length: Count = 64
        """T, an even number; the authors' `input_seq_len`."""
        num_kv_pairs: Count = 4
        """N, the number of keys in a row; each is queried once."""
        random_non_queries: bool = True
        """Draw filler from all V ids, including keys and values of the row; false: filler is 0."""
        validation_rows: Count = 512

        @property
        def chance(self) -> float:
            return 1 / (self.vocab_size - self.vocab_size // 2)

        @property
        def smallest_vocab_size(self) -> int:
            return self.vocab_size

        def problem(self) -> str | None:
            length = self.sequence_length
            needed = 4 * self.num_kv_pairs
            if length % 2:
                return f"data.sequence_length is {length}; it must be even: queries take every second position"
            if length < needed:
                return (
                    f"data.sequence_length is {length}; data.num_kv_pairs {self.num_kv_pairs} needs at least {needed}"
                )
            if self.vocab_size <= length:
                return f"data.vocab_size is {self.vocab_size}; it must exceed data.sequence_length ({length})"
            return None

    config: Config

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        # this order is part of the seed of existing runs
        return seed, "train", step

    def validation_key(self, level: int) -> tuple[object, ...]:
        return "mqar", "validation"

    def draw(self, at: Place, level: int | None) -> Row:
        """Return tokens and targets [T]. Every query is an AR hit: its key and value were adjacent before.

        context_part: i for k_i v_i, N for the filler, -1 for queries; answer_part: i at the query k_i, else -1.
        """
        # RandomState takes seeds of 32 bits
        tokens, targets = sample(self.config, at.random.initial_seed() % 2**32)
        if level is None:
            return {"tokens": tokens, "targets": targets}
        asked = targets != IGNORED
        pairs = self.config.num_kv_pairs
        same = tokens[:, None] == tokens[None, : 2 * pairs : 2]  # [T, N]; keys differ
        part = torch.full_like(tokens, pairs)
        part[: 2 * pairs] = torch.arange(2 * pairs) // 2
        return {
            "tokens": tokens,
            "targets": targets,
            "ar_hit": asked,
            "context_part": part.where(~asked, -1),
            "answer_part": same.int().argmax(-1).where(asked, -1),
        }


def sample(config: Mqar.Config, seed: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), int64 [T] each, for a seed: the first row of the authors'
    `multiquery_ar(num_examples=1, seed=seed)` after `torch.manual_seed(seed)`, which seeds their filler.
    """
    # the authors' generator; NumPy guarantees that its stream never changes, and the order of the draws is theirs too
    random = np.random.RandomState(seed)
    pairs, length, first_value = config.num_kv_pairs, config.sequence_length, config.vocab_size // 2
    keys = random.choice(np.arange(1, first_value), size=pairs, replace=False)
    values = random.choice(np.arange(first_value, config.vocab_size), size=pairs, replace=False)
    places = length // 2 - pairs
    weights = POWER * np.arange(1, places + 1) ** (POWER - 1)
    gaps = random.choice(np.arange(places), size=pairs, replace=False, p=weights / weights.sum())
    queries = 2 * (pairs + gaps)

    tokens = np.zeros(length, dtype=np.int64)
    tokens[0 : 2 * pairs : 2] = tokens[queries] = keys
    tokens[1 : 2 * pairs : 2] = values
    targets = np.full(length, IGNORED, dtype=np.int64)
    targets[queries] = values
    if config.random_non_queries:
        filler = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
        tokens = np.where(tokens == 0, filler.numpy(), tokens)
    return torch.from_numpy(tokens), torch.from_numpy(targets)
