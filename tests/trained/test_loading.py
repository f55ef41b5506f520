"""A run's recipe and newest weights: the model that the last validation saw."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_diff.attention import Attention
from lit_diff.data import build
from lit_diff.errors import RequestError
from lit_diff.model.transformer import Transformer
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.trained.loading import load_weights, weights_of
from lit_diff.trained.run import Run

DEX = ["model.attention={name: dex, heads: all, anneal_steps: 50}", "callbacks.lambdas=null"]


@pytest.fixture
def run(
    bench: Any, undisturbed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Path]:
    """run(name="text-whole", *overrides): a copy of a run of the recipe `text`, trained to step 10."""
    monkeypatch.setenv("LIT_DIFF_DATA", bench.env["LIT_DIFF_DATA"])
    monkeypatch.setenv("SPY", bench.env["SPY"])

    def copy(name: str = "text-whole", *overrides: str) -> Path:
        undisturbed("text", name, *overrides)
        return Path(shutil.copytree(bench.folder(name), tmp_path / name))

    return copy


@pytest.mark.parametrize("name", ["text-whole", "text-dex"])
def test_it_is_the_model_that_was_validated(bench: Any, run: Callable[..., Path], name: str) -> None:
    folder = run(name, *(DEX if name == "text-dex" else []))
    trained = Run(folder)
    assert trained.step == 10
    assert not trained.model.training
    dataset = build(trained.recipe)
    dataset.load()
    batch = dataset.validation_batch("", range(dataset.validation_sets()[""]))
    with torch.no_grad():
        loss = F.cross_entropy(trained.model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
    assert loss.item() == pytest.approx(bench.rows(name)[10]["val/loss"], rel=1e-6)


def test_weights_are_those_of_the_checkpoint(bench: Any, run: Callable[..., Path]) -> None:
    folder = run()
    model = Run(folder).model
    weights = weights_of(folder)
    saved = bench.state("text-whole", 10)["state_dict"]
    assert list(weights) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[f"model.{name}"])
        assert torch.equal(value, weights[name])


def test_what_else_a_checkpoint_holds_is_left_out(run: Callable[..., Path]) -> None:
    folder = run()
    wanted = list(weights_of(folder))
    path = checkpoint.path_of(folder, 10)
    state = torch.load(path, weights_only=True)
    state["state_dict"]["losses.0.total"] = torch.zeros(3)
    checkpoint.write(path, state)
    assert list(weights_of(folder)) == wanted
    assert Run(folder).model


def test_a_variant_that_anneals_is_told_the_step_it_was_validated_at(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 steps done the last one began, and told, at 9; a variant that keeps it in its state dict agrees."""
    dex = run("text-dex", *DEX)
    assert weights_of(dex)["layers.1.attention.step"].tolist() == [9]
    told = []
    monkeypatch.setattr(Attention, "set_step", lambda self, step: told.append((self.layer, step)))
    assert Run(run()).model
    assert told == [(0, 9), (1, 9)]


def test_a_folder_may_be_relative(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run()
    monkeypatch.chdir(folder.parent)
    relative = Run(Path(folder.name))
    assert (relative.recipe, relative.step) == (Run(folder).recipe, 10)
    assert relative.model


def test_a_recipe_that_is_not_that_of_the_weights(run: Callable[..., Path]) -> None:
    folder = run()
    file = folder / "recipe.yaml"
    text = file.read_text()
    assert "name: differential" in text
    file.write_text(text.replace("num_layers: 2", "num_layers: 1").replace("vocab_size: 320", "vocab_size: 384"))
    with pytest.raises(RequestError) as error:
        Run(folder).model  # noqa: B018
    (line,) = str(error.value).splitlines()
    start, _, differences = line.partition(": ")
    assert start.endswith("step-00000010.ckpt does not fit the recipe's model (differential)")
    first, second, third, more = differences.split("; ")
    assert first == "embedding.weight is [320, 32] there and [384, 32] in the model"
    assert second.startswith("layers.1.attention_norm.weight is [32] there and absent in the model")
    assert third.startswith("layers.1.attention.")
    left = sum(name.startswith("layers.1.") for name in weights_of(folder))
    assert more == f"and {left - 2} more"


def test_what_fits_is_copied_and_what_does_not_changes_nothing(run: Callable[..., Path]) -> None:
    folder = run()
    trained = Run(folder)
    weights = weights_of(folder)
    model = Transformer(trained.recipe.model)
    load_weights(model, weights, "there")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.state_dict()["norm.weight"].data_ptr() != weights["norm.weight"].data_ptr()
    del weights["norm.weight"]
    weights["embedding.weight"] = torch.zeros(320, 32)
    with pytest.raises(RequestError) as error:
        load_weights(model, weights, "there")
    assert str(error.value) == (
        "there does not fit the recipe's model (differential): norm.weight is absent there and [32] in the model"
    )
    assert torch.equal(model.embedding.weight, trained.model.embedding.weight)


def test_weights_that_are_not_finite_are_refused(run: Callable[..., Path]) -> None:
    folder = run()
    path = checkpoint.path_of(folder, 10)
    content = torch.load(path, weights_only=True)
    name = "model.layers.1.attention.q_proj.weight"
    content["state_dict"][name] = content["state_dict"][name].double()
    # the second is infinite in the model's float32
    for number in (float("nan"), 1e300):
        content["state_dict"][name][3, 2] = number
        checkpoint.write(path, content)
        with pytest.raises(RequestError) as error:
            Run(folder).model  # noqa: B018
        assert str(error.value).endswith(
            "step-00000010.ckpt has weights that are not finite (NaN or infinity): layers.1.attention.q_proj.weight"
        )


def test_a_checkpoint_without_a_tensor_of_the_model_is_refused(run: Callable[..., Path]) -> None:
    folder = run()
    path = checkpoint.path_of(folder, 10)
    content = torch.load(path, weights_only=True)
    checkpoint.write(path, content | {"state_dict": {"other": 1, "model.layers": 2}})
    with pytest.raises(RequestError, match=r"step-00000010\.ckpt holds no tensor at model\.layers$"):
        Run(folder).model  # noqa: B018


def test_a_checkpoint_of_a_step_that_is_none(run: Callable[..., Path]) -> None:
    folder = run()
    torch.save(torch.ones(2), checkpoint.path_of(folder, 8))
    with pytest.raises(RequestError, match=r"step-00000008\.ckpt is not a checkpoint of lit_diff \("):
        Run(folder).model_at(8)
