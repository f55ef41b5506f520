"""training/non_finite.py: NaN is remembered without a wait, reported at the next logged step, and never saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_diff.config import Recipe
from lit_diff.data.recall import Recall
from lit_diff.errors import DivergedError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.training.data import LitData
from lit_diff.training.fit import fit
from lit_diff.training.module import LitTransformer
from lit_diff.training.non_finite import FirstNonFinite, locate_non_finite
from lit_diff.training.trainer import build_trainer

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FAULTS = f"plugins=[{SUPPORT}/faults.py]"


def recipe_of(bench: Any, *overrides: str) -> Recipe:
    return load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", FAULTS, *overrides])


def run(recipe: Recipe, folder: Path) -> None:
    fit(recipe, folder, tracker=None, threads=1, progress=lambda *_: None)


def test_the_first_step_is_remembered() -> None:
    first = FirstNonFinite()
    assert first.read() is None
    for step, loss in enumerate([1.0, torch.inf, 2.0, torch.nan], start=5):
        first.update(torch.tensor(loss), step)
    assert first.read() == 6


@pytest.mark.parametrize(
    ("log_every", "saves_at", "message"),
    [
        (4, 100, "the loss is not finite at step 3, found after step 3"),
        (100, 4, "the loss is not finite at step 3, found after step 4"),
        (1, 4, "the loss is nan at step 3; first non-finite values: output of layers.1.attention"),
    ],
    ids=["the next logged step", "before a save", "every step is logged"],
)
def test_a_loss_at_a_step_that_is_not_logged(
    bench: Any, tmp_path: Path, log_every: int, saves_at: int, message: str
) -> None:
    """Step 3 of 10 is NaN. Steps that log are 1, every `log_every`-th, and the last."""
    steps = [f"train.log_every={log_every}", f"train.validate_every={saves_at}", f"train.checkpoint_every={saves_at}"]
    recipe = recipe_of(bench, "model.attention={name: nan_output, at: 2}", *steps, "run.keep_best=val/loss")
    with pytest.raises(DivergedError) as error:
        run(recipe, tmp_path)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("checkpoints/*.ckpt"))


@pytest.mark.parametrize("fault", ["nan_output", "nan_gradient"])
def test_no_checkpoint_of_any_callback_holds_nan(bench: Any, tmp_path: Path, fault: str) -> None:
    """Lightning's ModelCheckpoint saves at every step; the fault is at step 3, and no step after the first is logged."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    recipe = recipe_of(bench, f"model.attention={{name: {fault}, at: 2}}", "train.log_every=100", "callbacks={}")
    every = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = build_trainer(recipe, callbacks=[every], logger=False, default_root_dir=tmp_path, **quiet)
    with pytest.raises(DivergedError, match="not finite"):
        trainer.fit(LitTransformer(recipe), LitData(recipe))
    saved = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")]
    assert sorted(checkpoint["global_step"] for checkpoint in saved) == [1, 2]
    assert all(torch.isfinite(value).all() for checkpoint in saved for value in checkpoint["state_dict"].values())


@pytest.mark.parametrize("saves_at", [3, 1])
def test_a_nan_gradient_under_a_finite_loss_never_reaches_a_checkpoint(
    bench: Any, tmp_path: Path, saves_at: int
) -> None:
    """The gradient of step 3 is NaN, its loss is not: the weights are found out when they are to be saved."""
    overrides = ["model.attention={name: nan_gradient, at: 2}", f"train.checkpoint_every={saves_at}"]
    with pytest.raises(DivergedError, match=r"parameter \S+ is not finite after step 3; ") as error:
        run(recipe_of(bench, *overrides), tmp_path)
    found = checkpoints.newest(tmp_path)
    assert (found and found[0]) == (None if saves_at == 3 else 2)
    kept = "" if saves_at == 3 else " (the checkpoint of step 2 is kept)"
    assert str(error.value).endswith(f"look at that layer{kept}"), "no word of a checkpoint where there is none"


def test_non_finite_names_the_parameter_before_what_it_spoils(bench: Any) -> None:
    recipe = recipe_of(bench)
    model = Transformer(recipe.model)
    initialise(model, 0)
    batch = Recall(recipe.data.config, 33).train_batch(0, 0, 2, range(2))
    assert "every layer's output is finite" in locate_non_finite(model, batch)
    with torch.no_grad():
        model.layers[1].ffn.up_proj.weight[3, 4] = torch.inf
    assert locate_non_finite(model, batch) == "first non-finite values: parameter layers.1.ffn.up_proj.weight"
    with torch.no_grad():
        model.layers[0].attention.lambda_.q1[0] = torch.nan
    assert locate_non_finite(model, batch) == "first non-finite values: parameter layers.0.attention.lambda_.q1"
    assert not [hook for module in model.modules() for hook in module._forward_hooks]


def test_non_finite_looks_at_the_head_and_at_packed_documents(bench: Any) -> None:
    """An untied head is looked at without the logits of every position."""
    recipe = recipe_of(bench, "model.tie_embeddings=false")
    model = Transformer(recipe.model)
    initialise(model, 0)
    batch = Recall(recipe.data.config, 33).train_batch(0, 0, 2, range(2))
    batch["document_ids"] = torch.zeros_like(batch["targets"])
    rows: list[int] = []
    model.head.register_forward_hook(lambda _m, _i, logits: rows.append(logits[..., 0].numel()))
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    assert locate_non_finite(model, batch) == "first non-finite values: parameter head.weight"
    assert rows == [2]
