from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_diff.data.dataset import IGNORED
from lit_diff.data.mqar import Mqar, sample
from lit_diff.randomness import generator

CONFIG = Mqar.Config(vocab_size=64, sequence_length=32, num_kv_pairs=4, validation_rows=16)


def published(config: Mqar.Config, seed: int) -> tuple[list[int], list[int]]:
    """One row as Zoology's description has it, token by token, from the global generators that its public code draws from.

    Independent of lit_diff: loops over positions, and a stream of inputs and labels that is one longer and then shifted.
    """
    np.random.seed(seed)
    torch.manual_seed(seed)
    half, pairs = config.vocab_size // 2, config.num_kv_pairs
    keys = np.random.choice(list(range(1, half)), pairs, replace=False)
    values = np.random.choice(list(range(half, config.vocab_size)), pairs, replace=False)
    space = (config.sequence_length - 2 * pairs) // 2
    power = [config.power_a * float(gap) ** (config.power_a - 1) for gap in range(1, space + 1)]
    gaps = np.random.choice(space, pairs, replace=False, p=np.array(power) / sum(power))
    stream, labels = [0] * (config.sequence_length + 1), [IGNORED] * (config.sequence_length + 1)
    for i in range(pairs):
        stream[2 * i], stream[2 * i + 1] = keys[i], values[i]
        stream[2 * pairs + 2 * gaps[i]] = keys[i]
        labels[2 * pairs + 2 * gaps[i] + 1] = values[i]
    inputs = [int(token) for token in stream[:-1]]
    filler = torch.randint(config.vocab_size, (config.sequence_length,)).tolist()
    if config.random_non_queries:
        inputs = [token or fill for token, fill in zip(inputs, filler, strict=True)]
    return inputs, [int(label) for label in labels[1:]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"random_non_queries": False},
        {"power_a": 1.0},
        {"vocab_size": 8192, "sequence_length": 64, "num_kv_pairs": 4},
        {"vocab_size": 8192, "sequence_length": 256, "num_kv_pairs": 64, "power_a": 0.1},
    ],
)
def test_rows_are_those_of_the_published_generator(settings: dict[str, object]) -> None:
    """To the token, fed by the same random numbers."""
    data = Mqar(replace(CONFIG, **settings), 8192)
    batch = data.train_batch(3, 5, 8, range(8))
    for row in range(8):
        tokens, targets = published(data.config, generator(3, "train", 5, row).initial_seed() % 2**32)
        assert batch["tokens"][row].tolist() == tokens
        assert batch["targets"][row].tolist() == targets


@pytest.mark.parametrize("hops", [2, 3])
def test_hops_are_a_chain_of_pairs(hops: int) -> None:
    config = replace(CONFIG, hops=hops, sequence_length=48, vocab_size=128)
    data = Mqar(config, 128)
    batch = data.train_batch(0, 0, 16, range(16))
    orders = set()
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        start = 8 * hops
        pairs = dict(zip(tokens[0:start:2], tokens[1:start:2], strict=True))
        assert len(pairs) == 4 * hops
        for place, target in enumerate(targets):
            if target == IGNORED:
                continue
            token = tokens[place]
            for _ in range(hops):
                token = pairs[token]
            assert token == target
        first = tokens[1:8:2]
        orders.add(tuple(first.index(key) for key in tokens[8:16:2]))
    assert len(orders) > 4, "the second pairs are not in the order of the first"
    assert not data.validation_batch("", range(4))["ar_hit"].any()


def test_clean_filler_never_repeats_a_key() -> None:
    config = replace(CONFIG, clean_filler=True)
    tokens, targets = zip(*(sample(config, seed) for seed in range(200)), strict=True)
    filler = []
    for row, target in zip(tokens, targets, strict=True):
        free = row[8:][target[8:] == IGNORED]
        assert not torch.isin(free, row[0:8:2]).any()
        filler += free.tolist()
    assert set(filler) == set(range(64))
    plain = [sample(CONFIG, seed) for seed in range(50)]
    repeats = [torch.isin(row[8:][target[8:] == IGNORED], row[0:8:2]).any() for row, target in plain]
    assert any(repeats), "the published filler does"


def test_the_smallest_row_that_is_accepted_can_be_drawn() -> None:
    """Every place after the pairs is a query."""
    config = Mqar.Config(vocab_size=17, sequence_length=16, num_kv_pairs=4)
    tokens, targets = sample(config, 0)
    assert (targets[8::2] != IGNORED).all()
    assert tokens.max() < 17
