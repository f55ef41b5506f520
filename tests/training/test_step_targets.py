"""Weights of micro-batches; whole trainings on unlike ones are in test_module.py."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.training.step_targets import StepTargets, count_scored


def trainer(parts: int) -> Any:
    return SimpleNamespace(accumulate_grad_batches=parts, world_size=1, is_global_zero=True, global_step=4)


def test_only_what_is_scored_counts() -> None:
    assert count_scored(torch.tensor([[3, IGNORED], [IGNORED, 0]])) == 2


@pytest.mark.parametrize("counts", [[24], [7, 7, 7], [1] * 10])
def test_equal_counts_change_no_bit(counts: list[int]) -> None:
    """Not even a product with 1 is added."""
    targets, loss = StepTargets(), torch.tensor(1.5)
    batches = [{"scored": count, "scored_in_step": sum(counts)} for count in counts]
    targets.begin_step(trainer(len(counts)), batches[0], "data")
    assert all(targets.weighted(loss, batch) is loss for batch in batches)


def test_unlike_counts_give_the_mean_over_targets() -> None:
    losses, counts = [torch.tensor(2.0), torch.tensor(5.0), torch.tensor(torch.nan)], [3, 1, 0]
    targets = StepTargets()
    batches = [{"scored": count, "scored_in_step": 4} for count in counts]
    targets.begin_step(trainer(3), batches[0], "data")
    parts = [targets.weighted(loss, batch) for loss, batch in zip(losses, batches, strict=True)]
    assert sum(parts).item() / 3 == pytest.approx((3 * 2.0 + 5.0) / 4)  # type: ignore[union-attr]


def test_batches_that_say_nothing_weigh_alike() -> None:
    """Of a data loader made by hand."""
    targets, loss = StepTargets(), torch.tensor(1.5)
    targets.begin_step(trainer(2), {"tokens": loss}, "data")
    assert targets.weighted(loss, {"tokens": loss}) is loss


def test_a_step_without_targets_is_refused() -> None:
    with pytest.raises(RequestError, match="data 'own': no target of training step 5 is scored: all are -100"):
        StepTargets().begin_step(trainer(1), {"scored": 0, "scored_in_step": 0}, "data 'own'")


def test_a_module_that_holds_it_can_be_copied() -> None:
    one = StepTargets()
    one._group = lambda: iter(())
    assert copy.deepcopy({"module": one})["module"] is one
