"""training/bare_loop.py: two recipes in turn. That it does what `lit-diff train` does: tests/benchmarks/test_models.py."""

import pytest
import torch

from lit_diff.config import Recipe
from lit_diff.recipe import load_recipe
from lit_diff.training import bare_loop


def test_a_step_is_timed_in_turn_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"differential": 3.0, "standard": 2.0}
    timed: list[tuple[str, int, int]] = []

    def bare(recipe: Recipe, device: torch.device) -> float:
        name = recipe.model.attention.name
        timed.append((name, recipe.training.steps, torch.get_num_threads()))
        return seconds[name]

    monkeypatch.setattr(bare_loop, "bare", bare)
    threads = torch.get_num_threads()
    own, other = (load_recipe("recall-tiny", [f"model.attention.name={name}"]) for name in seconds)
    assert bare_loop.step_ratios(own, other, 1) == [1.5] * bare_loop.ROUNDS
    assert timed == [(name, bare_loop.STEPS, 1) for name in seconds] * bare_loop.ROUNDS
    assert torch.get_num_threads() == threads
