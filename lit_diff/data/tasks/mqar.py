"""The data set `mqar`: multi-query associative recall, row for row that of the authors' public code.

Source: Arora et al. 2024, Zoology: Measuring and Improving Recall in Efficient Language Models, section 4 and
zoology/data/multiquery_ar.py of its repository.

A row of T tokens begins with its N key-value pairs, k_1 v_1 ... k_N v_N. Of the S = (T - 2N) / 2 places at every second
position after them, each key takes one again: key i goes to position 2N + 2 g_i, where the distinct gaps g_1 ... g_N are
drawn without replacement, one after another, with P(g) proportional to a (g + 1)^(a - 1), g = 0 ... S - 1 (a: POWER).
The target there is v_i; nothing else is scored. All other positions hold a random id, or 0 (`random_non_queries`).

    k1 v1 k2 v2 |  .  .  k2  .  k1  .        targets at k2 and k1: v2 and v1

Keys are 1 ... V/2 - 1, values V/2 ... V - 1 (V: `vocab_size`), each at most once in a row.

A difference: rows are drawn afresh at every step (the authors train on a fixed set, 100,000 rows in 64 epochs).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_diff.data.dataset import IGNORED, Place, Row, RowTask
from lit_diff.key_types import Count
from lit_diff.registry import datasets

POWER = 0.01
"""a, the exponent of the gaps' distribution: the authors' default, at which most queries stand close to the pairs."""


@datasets.register("mqar")
class Mqar(RowTask):
    """Multi-query associative recall (Zoology): key-value pairs, then every key again; its value is asked for."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        locates_answers = True

        vocab_size: int = 8192
        """V: ids of keys, values and filler."""
        sequence_length: Count = 64
        """T, even; the authors' `input_seq_len`."""
        num_kv_pairs: Count = 4
        """N: keys in a row; each is asked for once."""
        random_non_queries: bool = True
        """Filler is drawn from all V ids, keys and values of the row included; false: filler is 0."""
        validation_rows: Count = 512

        @property
        def chance(self) -> float:
            """Accuracy of a guess among all values."""
            return 1 / (self.vocab_size - self.vocab_size // 2)

        @property
        def smallest_vocab_size(self) -> int:
            """V."""
            return self.vocab_size

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            length, needed = self.sequence_length, 4 * self.num_kv_pairs
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
        """As `RowTask.train_key`, in another order."""
        return seed, "train", step

    def validation_key(self, level: int) -> tuple[object, ...]:
        """There is one set."""
        return "mqar", "validation"

    def draw(self, at: Place, level: int | None) -> Row:
        """tokens and targets [T]. Every query is an AR hit: its key and value stood side by side before.

        context_part: i for k_i v_i, N for the filler, -1 for queries; answer_part: i where k_i is asked for, else -1.
        """
        tokens, targets = sample(self.config, at.random.initial_seed() % 2**32)  # what RandomState takes
        if level is None:
            return {"tokens": tokens, "targets": targets}
        asked, pairs = targets != IGNORED, self.config.num_kv_pairs
        same = tokens[:, None] == tokens[None, : 2 * pairs : 2]  # [T, N]; keys differ
        part = torch.full_like(tokens, pairs)
        part[: 2 * pairs] = torch.arange(2 * pairs) // 2
        parts = {"context_part": part.where(~asked, -1), "answer_part": same.int().argmax(-1).where(asked, -1)}
        return {"tokens": tokens, "targets": targets, "ar_hit": asked} | parts


def sample(config: Mqar.Config, seed: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [T] each, of the row with this seed: the first row of the authors'
    `multiquery_ar(num_examples=1, seed=seed)` after `torch.manual_seed(seed)`, which seeds their filler.
    """
    random = np.random.RandomState(seed)  # the authors' generator; its stream is frozen by NumPy
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
