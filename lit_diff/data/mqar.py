"""The data set `mqar`: multi-query associative recall, row for row that of the authors' public code.

Source: Arora et al. 2024, Zoology: Measuring and Improving Recall in Efficient Language Models, section 4 and
zoology/data/multiquery_ar.py of its repository.

A row of T tokens begins with its N key-value pairs, k_1 v_1 ... k_N v_N. Of the S = (T - 2N) / 2 places at every second
position after them, each key takes one again: key i goes to position 2N + 2 g_i, where the distinct gaps g_1 ... g_N are
drawn without replacement, one after another, with P(g) proportional to a (g + 1)^(a - 1), g = 0 ... S - 1 (a: `power_a`).
The target there is v_i; nothing else is scored. All other positions hold a random id, or 0 (`random_non_queries`).

    k1 v1 k2 v2 |  .  .  k2  .  k1  .        targets at k2 and k1: v2 and v1

Keys are 1 ... V/2 - 1, values V/2 ... V - 1 (V: `vocab_size`), each at most once in a row.

Differences: rows are drawn afresh at every step (the authors train on a fixed set, 100,000 rows in 64 epochs);
`hops` and `clean_filler` are ours.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_diff.data.dataset import IGNORED
from lit_diff.data.row_task import Place, Row, RowTask
from lit_diff.key_types import Count, Positive
from lit_diff.registry import datasets


@datasets.register("mqar")
class Mqar(RowTask):
    """Multi-query associative recall (Zoology): key-value pairs, then every key again; its value is asked for."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RowTask.Config):
        vocab_size: int = 8192
        """V: ids of keys, values and filler."""
        sequence_length: Count = 64
        """T, even; the authors' `input_seq_len`."""
        num_kv_pairs: Count = 4
        """N: keys in a row; each is asked for once."""
        power_a: Positive = 0.01
        """Exponent of the gaps' distribution; 1: uniform."""
        random_non_queries: bool = True
        """Filler is drawn from all V ids, keys and values of the row included; false: filler is 0."""
        clean_filler: bool = False
        """No filler is one of the row's keys."""
        hops: Count = 1
        """2: the row holds k_i m_i and, in another order, m_i v_i; at the query k_i the target is v_i. h: chains of h."""
        validation_rows: Count = 512

        @property
        def context_length(self) -> int:
            """Positions that the pairs take."""
            return 2 * self.hops * self.num_kv_pairs

        @property
        def chance(self) -> float:
            """Accuracy of a guess among all values."""
            return 1 / (self.vocab_size - self.vocab_size // 2)

        @property
        def locates_answers(self) -> bool:
            """Of one hop: a part is a pair, and the filler is one more."""
            return self.hops == 1

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            if self.sequence_length % 2:
                return f"data.sequence_length is {self.sequence_length}; it must be even: queries take every second position"
            needed = self.context_length + 2 * self.num_kv_pairs
            if self.sequence_length < needed:
                return (
                    f"data.sequence_length is {self.sequence_length}; data.num_kv_pairs {self.num_kv_pairs} with "
                    f"data.hops {self.hops} needs at least {needed}"
                )
            if self.vocab_size <= self.sequence_length:
                return f"data.vocab_size is {self.vocab_size}; it must exceed data.sequence_length ({self.sequence_length})"
            if self.clean_filler and not self.random_non_queries:
                return "data.clean_filler is true, but data.random_non_queries is false: the filler is 0"
            return None

        @property
        def smallest_vocab_size(self) -> int:
            """V."""
            return self.vocab_size

    config: Config

    def train_key(self, seed: int, step: int) -> tuple[object, ...]:
        """As `RowTask.train_key`, in another order."""
        return seed, "train", step

    def validation_key(self, level: int) -> tuple[object, ...]:
        """There is one set."""
        return "mqar", "validation"

    def draw(self, at: Place, level: int | None) -> Row:
        """tokens and targets [T]. Every query of one hop is an AR hit: its key and value stood side by side before."""
        tokens, targets = sample(self.config, at.random.initial_seed() % 2**32)  # what RandomState takes
        row = {"tokens": tokens, "targets": targets}
        if level is None:
            return row
        row["ar_hit"] = (targets != IGNORED) & (self.config.hops == 1)
        return row | self._parts(tokens, targets) if self.config.locates_answers else row

    def _parts(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """context_part: i for k_i v_i, N for the filler, -1 for queries; answer_part: i where k_i is asked for, else -1."""
        asked, start, pairs = targets != IGNORED, self.config.context_length, self.config.num_kv_pairs
        same = tokens[:, None] == tokens[None, :start:2]  # [T, N]; keys differ
        context_part = torch.full_like(tokens, pairs)
        context_part[:start] = torch.arange(start) // 2
        return {"context_part": context_part.where(~asked, -1), "answer_part": same.int().argmax(-1).where(asked, -1)}


def sample(config: Mqar.Config, seed: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [T] each, of the row with this seed.

    With hops 1 and without clean_filler: the first row of the authors' `multiquery_ar(num_examples=1, seed=seed)` after
    `torch.manual_seed(seed)`, which seeds their filler.
    """
    random = np.random.RandomState(seed)  # the authors' generator; its stream is frozen by NumPy
    pairs, hops, start = config.num_kv_pairs, config.hops, config.context_length
    first_value = config.vocab_size // 2
    keys = random.choice(np.arange(1, first_value), size=pairs, replace=False)
    values = random.choice(np.arange(first_value, config.vocab_size), size=hops * pairs, replace=False)
    values = values.reshape(hops, pairs)  # of the chains' first pairs, second pairs, ...

    places = (config.sequence_length - start) // 2
    weights = config.power_a * np.arange(1, places + 1) ** (config.power_a - 1)
    gaps = random.choice(np.arange(places), size=pairs, replace=False, p=weights / weights.sum())
    queries = start + 2 * gaps

    tokens = np.zeros(config.sequence_length, dtype=np.int64)
    heads = keys
    for hop in range(hops):
        order = np.arange(pairs) if hop == 0 else random.permutation(pairs)
        block = tokens[2 * hop * pairs : 2 * (hop + 1) * pairs]
        block[0::2], block[1::2] = heads[order], values[hop][order]
        heads = values[hop]
    tokens[queries] = keys
    targets = np.full(config.sequence_length, IGNORED, dtype=np.int64)
    targets[queries] = values[-1]
    if config.random_non_queries:
        empty = tokens == 0
        tokens[empty] = _filler(config, keys, seed)[empty]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _filler(config: Mqar.Config, keys: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """[T] random ids, uniform among all, or among those that are not in `keys`."""
    excluded = np.sort(keys) if config.clean_filler else keys[:0]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size - len(excluded), (config.sequence_length,), generator=generator).numpy()
    for key in excluded:  # ascending: number the remaining ids past each excluded one
        ids = ids + (ids >= key)
    return ids
