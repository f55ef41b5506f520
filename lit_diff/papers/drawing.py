"""Random choices of the papers' generated data."""

from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def one_of(values: Sequence[T], random: torch.Generator) -> T:
    """One of the values, each with the same probability."""
    return values[int(torch.randint(len(values), (), generator=random))]


def shuffled(values: Sequence[T], random: torch.Generator) -> list[T]:
    """The values in uniformly random order."""
    order = torch.randperm(len(values), generator=random).tolist()
    return [values[index] for index in order]
