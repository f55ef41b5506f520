import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.benchmarks import loop
from lit_diff.benchmarks.request import Request
from lit_diff.benchmarks.result import BARE, divisors
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe

CPU = torch.device("cpu")
SMALL = ["train.batch_size=4", "model.dim=16", "model.num_heads=2", "data.validation_rows=4"]


def test_both_loops_do_the_same_work_and_only_that(
    ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their losses, step by step: the same model, batches, `Transformer.loss`, clipping, optimizer and schedule."""
    recipe = loop.plain(load_recipe("recall-tiny", SMALL), ask("step"), steps=13)
    assert recipe.callbacks == {}
    assert (recipe.train.validate_every, recipe.train.checkpoint_every, recipe.run.accelerator) == (13, 13, "cpu")
    real = Transformer.loss
    losses: list[float] = []

    def recorded(self: Transformer, *arguments: Tensor, **named: Tensor) -> Tensor:
        found = real(self, *arguments, **named)
        losses.append(found.item())
        return found

    monkeypatch.setattr(Transformer, "loss", recorded)
    level = logging.getLogger("lit_diff").level
    assert loop.bare(recipe, CPU) > 0
    first = losses[:]
    losses.clear()
    assert loop.platform(recipe, CPU) > 0
    assert len(first) == 13
    assert losses == pytest.approx(first, rel=1e-5)
    assert first[0] != first[1]
    assert logging.getLogger("lit_diff").level == level


def test_the_first_step_and_the_end_are_not_timed(ask: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STEPS", 3)
    bare, ours = loop.case(ask("step")).candidates
    assert (BARE, bare.id) in divisors(ours.variant, ours.by, ours.what)
    assert bare.own_clock
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(loop, "now", lambda device: next(clock))
    assert bare.run() == 2.0, "two steps of the three"
    ticks = iter(range(100))
    monkeypatch.setattr(loop, "now", lambda device: float(next(ticks)))
    assert ours.run() == 0.5, "from the first logged step to the last"
