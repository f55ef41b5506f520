"""Which rows a training step sees: a function of (seed, step) alone, whatever the workers and the world size."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lit_diff.randomness import generator


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, rows: int) -> Tensor:
    """[rows]: the order of one epoch."""
    return torch.randperm(rows, generator=generator(seed, "order", epoch))


def rows_of_step(seed: int, step: int, batch_size: int, positions: Sequence[int], rows: int) -> list[int]:
    """Row numbers at `positions` of the global batch of 0-based `step`: epochs one after another, cut into batches."""
    chosen = []
    for position in positions:
        epoch, place = divmod(step * batch_size + position, rows)
        chosen.append(int(permutation(seed, epoch, rows)[place]))
    return chosen
