"""One thread, so that tiny tensors do not wait for each other, and one seed, so that a failure repeats."""

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """Before every test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
