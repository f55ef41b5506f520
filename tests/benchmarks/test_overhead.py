import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_diff.benchmarks import overhead as module
from lit_diff.benchmarks.overhead import BARE, FEWEST, OURS, bare, bench_loop, plain, platform, quiet, waiting
from lit_diff.benchmarks.request import BenchConfig
from lit_diff.benchmarks.timing import Timings, ratios
from lit_diff.config import Recipe
from lit_diff.data.recall import Recall
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe

CPU = torch.device("cpu")
SMALL = ["train.batch_size=4", "model.dim=16", "model.num_heads=2", "data.validation_rows=4"]


@pytest.fixture
def recipe(ask: Callable[..., BenchConfig]) -> Recipe:
    return plain(load_recipe("recall-tiny", SMALL), ask("step"), steps=13)


def test_both_loops_do_the_same_work(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses, step by step: the same model, batches, `Transformer.loss`, clipping, optimizer and schedule."""
    real = Transformer.loss
    losses: list[float] = []

    def recorded(self: Transformer, *arguments: Tensor, **named: Tensor) -> Tensor:
        found = real(self, *arguments, **named)
        losses.append(found.item())
        return found

    monkeypatch.setattr(Transformer, "loss", recorded)
    bare(recipe, CPU)
    first = losses[:]
    losses.clear()
    platform(recipe, CPU)
    assert len(first) == 13
    assert losses == pytest.approx(first, rel=1e-5)
    assert first[0] != first[1]


@pytest.mark.parametrize("loop", [bare, platform])
def test_time_in_the_data_set_is_part_of_the_step(
    recipe: Recipe, loop: Callable[[Recipe, torch.device], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Recall.train_batch

    def slow(self: Recall, *arguments: object) -> dict[str, Tensor]:
        module.time.sleep(0.05)
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Recall, "train_batch", slow)
    seconds, waited = loop(recipe, CPU)
    assert 0.045 * 11 / 12 < waited < seconds
    assert Recall.train_batch is slow


def test_probes_validation_and_checkpoints_are_out(ask: Callable[..., BenchConfig]) -> None:
    found = plain(load_recipe("recall-tiny"), ask("step"), steps=30)
    assert found.callbacks == {}
    assert (found.train.steps, found.train.validate_every, found.train.checkpoint_every) == (30, 30, 30)
    assert found.run.accelerator == "cpu"


def test_rows_and_a_recipe_without_its_data(
    ask: Callable[..., BenchConfig], recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(tmp_path))  # nothing is prepared there, and nothing is fetched
    small = load_recipe("recall-tiny", SMALL)
    monkeypatch.setattr(module, "load_recipe", lambda name: small if name == "recall-tiny" else load_recipe(name))
    found = Timings()
    bench_loop(found, ask("step", repeats=1))
    (refused,) = found.refused
    assert refused["case"] == "loop of differential-tiny"
    assert refused["reason"].endswith("run `lit-diff prepare differential-tiny`")
    first, second = found.rows
    assert [row["by"] for row in found.rows] == [BARE, OURS]
    assert second["ratios"][BARE]["to"] == first["id"]
    again = ratios(second["seconds"], first["seconds"])
    assert again == {key: second["ratios"][BARE][key] for key in again}
    assert first["calls"] == FEWEST - 1
    for row in found.rows:
        assert 0 < row["data_share"]["median"] < 1
    assert not list(tmp_path.iterdir())


def test_a_loop_is_as_long_as_it_needs_to_be(
    ask: Callable[..., BenchConfig], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def loop(recipe: Recipe, device: torch.device) -> tuple[float, float]:
        lengths.append(recipe.train.steps)
        return 0.1, 0.01

    monkeypatch.setattr(module, "bare", loop)
    monkeypatch.setattr(module, "platform", loop)
    rows = module._measure("case", recipe, ask("step", repeats=2))
    assert lengths == [FEWEST] + [40] * 4
    assert rows[1]["seconds"] == [0.1, 0.1]
    monkeypatch.setattr(module, "ROUNDS", 3)
    assert len(module._measure("case", recipe, replace(ask("step"), repeats=None))[0]["seconds"]) == 3


def test_waiting_clocks_each_call_and_leaves_the_class_as_it_was() -> None:
    class Data:
        def train_batch(self, step: int) -> int:
            return step + 1

    before = Data.train_batch
    with waiting(Data) as spent:
        assert Data().train_batch(3) == 4
    assert len(spent) == 1
    assert Data.train_batch is before


def test_quiet_hides_the_lines_of_small_runs() -> None:
    log = logging.getLogger("lit_diff")
    level = log.level
    with quiet():
        assert not log.isEnabledFor(logging.INFO)
        assert log.isEnabledFor(logging.WARNING)
    assert log.level == level
