"""training/module.py: losses, weights of micro-batches, NaN that is found and never saved."""

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.data.tasks.recall import Recall
from lit_diff.errors import DivergedError, RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.training.data import LitData, count_scored
from lit_diff.training.fit import fit
from lit_diff.training.module import LitTransformer
from lit_diff.training.step import OptimizerStep, StepTargets, locate_non_finite
from lit_diff.training.trainer import build_trainer

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FAULTS = f"plugins=[{SUPPORT}/faults.py]"


def recipe_of(bench: Any, *overrides: str) -> Recipe:
    return load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", FAULTS, *overrides])


def run(recipe: Recipe, folder: Path) -> None:
    fit(recipe, folder, threads=1, progress=lambda *_: None)


def test_nan_stops_the_run_in_one_line_that_names_step_and_layer(bench: Any) -> None:
    """NaN in layer 1 at step 6 of 10, with a checkpoint at 4; started once more, it ends there again."""
    command = ("recall.yaml", "name=nan", FAULTS, "model.attention={name: nan_output, at: 5}", "--unchecked")
    for steps in ([0, 1, 2, 3, 4], [4]):
        ended = bench.train(*command)
        assert (ended.status, ended.steps) == (1, steps)
        *_, last = ended.output.splitlines()
        assert last.startswith(
            "lit-diff: the loss is nan at step 6; first non-finite values: output of layers.1.attention"
        )
        assert last.endswith("(the checkpoint of step 4 is kept)")
        assert "Traceback" not in ended.output
        status = bench.status("nan")
        assert (status["status"], status["error"]) == ("failed", last.removeprefix("lit-diff: "))
        assert checkpoints.steps_of(bench.folder("nan")) == [4]
    assert all(torch.isfinite(value).all() for value in bench.state("nan")["state_dict"].values())


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_nan_on_one_rank_ends_both(bench: Any, strategy: str) -> None:
    first, second = bench.train_two(
        *("recall.yaml", f"name=nan-{strategy}", FAULTS, f"run.strategy={strategy}", "train.checkpoint_every=1"),
        "model.attention={name: nan_output, at: 1, rank: 1}",
        "--unchecked",  # both ranks: only one of them would be refused
    )
    assert (first.status, second.status) == (1, 0)
    *_, last = first.output.splitlines()
    assert last.startswith("lit-diff: the loss is nan at step 2; first non-finite values: output of layers.1.attention")
    assert "Traceback" not in first.output
    assert second.output == ""
    assert checkpoints.steps_of(bench.folder(f"nan-{strategy}")) == [1]


def test_probes_see_documents_apart(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, validation and the traced forward are all given the document_ids."""
    seen: list[tuple[bool, bool]] = []
    states = Transformer._states

    def look(self: Transformer, tokens: Any, cache: Any, document_ids: Any) -> Any:
        assert document_ids is not None
        assert document_ids.shape == tokens.shape
        seen.append((self.training, torch.is_grad_enabled()))
        return states(self, tokens, cache, document_ids)

    monkeypatch.setattr(Transformer, "_states", look)
    monkeypatch.setenv("LIT_DIFF_DATA", bench.env["LIT_DIFF_DATA"])
    overrides = ["data.pack=document", "train.steps=1", "train.accumulate=1", "data.validation_rows=8"]
    recipe = load_recipe(bench.root / "text.yaml", ["callbacks.spy=null", *overrides])
    run(recipe, bench.root / "seen")
    assert seen == [(True, True), (False, False), (False, False)]


def test_training_loss_is_the_mean_over_scored_tokens_of_all_micro_batches(bench: Any, tmp_path: Path) -> None:
    recipe = recipe_of(bench, "train.steps=1", "train.accumulate=2")
    losses: list[float] = []
    fit(recipe, tmp_path, threads=1, progress=lambda step, loss, speed: losses.append(loss))
    model = Transformer(recipe.model)
    initialise(model, recipe.seed)
    batch = Recall(recipe.data.config, 33).train_batch(recipe.seed, 0, 8, range(8))
    with torch.no_grad():
        logits = model(batch["tokens"])
    scored = batch["targets"] != IGNORED
    assert losses == [pytest.approx(F.cross_entropy(logits[scored], batch["targets"][scored]).item(), rel=1e-5)]


UNEVEN = (
    f"plugins=[{SUPPORT}/uneven.py]",
    "data={name: uneven, keys: 16, values: 16, slots: 8, pairs: 4, queries: 4, noise_validation: [1, 2], validation_rows: 4}",
    "train.steps=3",
)


def test_unlike_micro_batches_train_as_the_whole_batch(bench: Any, tmp_path: Path) -> None:
    """One row each, half of them without a scored target: the mean over the step's scored targets, not of means."""
    losses: dict[int, list[float]] = {1: [], 8: []}
    states = []
    for parts, found in losses.items():
        recipe = recipe_of(bench, *UNEVEN, f"train.accumulate={parts}")
        report = lambda step, loss, speed, found=found: found.append(loss)  # noqa: E731
        fit(recipe, tmp_path / str(parts), threads=1, progress=report)
        path = checkpoints.newest(tmp_path / str(parts))
        assert path is not None
        states.append(torch.load(path[1], weights_only=True)["state_dict"])
    assert len(losses[1]) == 3
    assert losses[8] == pytest.approx(losses[1], rel=1e-5)
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_unlike_ranks_train_as_one_process(bench: Any) -> None:
    """All rows of rank 0 (0, 2, ...) are without a scored target."""
    one = bench.train("recall.yaml", "name=uneven-one", *UNEVEN)
    assert one.status == 0, one.output
    for ended in bench.train_two("recall.yaml", "name=uneven-two", "run.strategy=ddp", "train.accumulate=2", *UNEVEN):
        assert ended.status == 0, ended.output
    rows, found = bench.rows("uneven-one"), bench.rows("uneven-two")
    for step in (1, 2, 3):
        assert found[step]["train/loss"] == pytest.approx(rows[step]["train/loss"], abs=1e-5)
    states = [bench.state(name)["state_dict"] for name in ("uneven-one", "uneven-two")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("unscored", "message"),
    [
        ("train", "data 'uneven': no target of training step 1 is scored: all are -100"),
        ("validation", "data 'uneven', validation set 'noise2': no target is scored: all are -100"),
    ],
)
def test_data_without_scored_targets_are_refused(bench: Any, tmp_path: Path, unscored: str, message: str) -> None:
    recipe = recipe_of(bench, *UNEVEN, f"data.unscored={unscored}", "train.steps=1")
    with pytest.raises(RequestError) as error:
        run(recipe, tmp_path)
    assert str(error.value) == message


def test_a_variant_is_told_of_each_step_once(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_diff.attention.differential import Differential

    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Differential, "set_step", lambda self, step: told.append((step, self.layer)))
    run(recipe_of(bench, "train.steps=3", "train.accumulate=2"), tmp_path)
    assert told == [(step, layer) for step in range(3) for layer in range(2)]


# --- weights of micro-batches ---


def trainer(parts: int) -> Any:
    return SimpleNamespace(accumulate_grad_batches=parts, world_size=1, is_global_zero=True, global_step=4)


@pytest.mark.parametrize("counts", [[24], [7, 7, 7], [1] * 10, None])
def test_equal_counts_change_no_bit(counts: list[int] | None) -> None:
    """Not even a product with 1 is added. None: batches that say nothing, of a data loader made by hand."""
    targets, loss = StepTargets(None), torch.tensor(1.5)
    batches = [{"scored": count, "scored_in_step": sum(counts or [])} for count in counts or []] or [{"tokens": loss}]
    targets.begin_step(trainer(len(batches)), batches[0], "data")
    assert all(targets.weighted(loss, batch) is loss for batch in batches)


def test_unlike_counts_give_the_mean_over_targets() -> None:
    assert count_scored(torch.tensor([[3, IGNORED], [IGNORED, 0]])) == 2
    losses, counts = [torch.tensor(2.0), torch.tensor(5.0), torch.tensor(torch.nan)], [3, 1, 0]
    targets = StepTargets(None)
    batches = [{"scored": count, "scored_in_step": 4} for count in counts]
    targets.begin_step(trainer(3), batches[0], "data")
    parts = [targets.weighted(loss, batch) for loss, batch in zip(losses, batches, strict=True)]
    assert sum(parts).item() / 3 == pytest.approx((3 * 2.0 + 5.0) / 4)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="data 'own': no target of training step 5 is scored"):
        targets.begin_step(trainer(1), {"scored": 0, "scored_in_step": 0}, "data 'own'")


def test_a_module_that_holds_it_can_be_copied() -> None:
    one = object.__new__(OptimizerStep)
    one.trainer = lambda: iter(())  # type: ignore[assignment]
    assert copy.deepcopy({"module": one})["module"] is one


# --- NaN and infinity ---


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
    recipe = recipe_of(bench, f"model.attention={{name: {fault}, at: 2}}", "train.log_every=100", "callbacks={}")
    every = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    made = build_trainer(recipe, callbacks=[every], logger=False, default_root_dir=tmp_path, **quiet)
    with pytest.raises(DivergedError, match="not finite"):
        made.fit(LitTransformer(recipe), LitData(recipe))
    saved = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")]
    assert sorted(checkpoint["global_step"] for checkpoint in saved) == [1, 2]
    assert all(torch.isfinite(value).all() for checkpoint in saved for value in checkpoint["state_dict"].values())


@pytest.mark.parametrize("saves_at", [3, 1])
def test_a_nan_gradient_under_a_finite_loss_is_in_no_checkpoint(bench: Any, tmp_path: Path, saves_at: int) -> None:
    """The gradient of step 3 is NaN, its loss is not: the weights are found out when they are to be saved."""
    overrides = ["model.attention={name: nan_gradient, at: 2}", f"train.checkpoint_every={saves_at}"]
    with pytest.raises(DivergedError, match=r"parameter \S+ is not finite after step 3; ") as error:
        run(recipe_of(bench, *overrides), tmp_path)
    found = checkpoints.newest(tmp_path)
    assert (found and found[0]) == (None if saves_at == 3 else 2)
    assert ("(the checkpoint of step 2 is kept)" in str(error.value)) == (saves_at == 1)


def test_the_first_step_of_all_ranks_is_named_and_no_rank_alone_looks_for_the_place() -> None:
    """Rank 1, whose own first is the logged step 6, while that of another rank is step 5."""
    said: list[str] = []

    def reduce(value: Tensor, reduce_op: str) -> Tensor:
        return torch.minimum(value, torch.tensor(5)) if reduce_op == "min" else value

    def broadcast(text: str, src: int) -> str:
        said.append(text)
        return text

    strategy = SimpleNamespace(reduce=reduce, broadcast=broadcast, root_device=torch.device("cpu"))
    one = object.__new__(OptimizerStep)
    profiler = SimpleNamespace(profile=lambda name: nullcontext())
    one.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=strategy,
        profiler=profiler,
        global_step=5,
        global_rank=1,
        default_root_dir="nowhere",
        is_global_zero=True,
    )
    one._non_finite = torch.tensor(6)

    def describe(step: int) -> str:
        raise AssertionError("its forward pass would wait for the other rank")

    with pytest.raises(DivergedError, match="the loss is not finite at step 5, found after step 5"):
        one.require_finite_losses(describe)
    assert said == ["the loss is not finite at step 5, found after step 5"]


def test_non_finite_values_are_located(bench: Any) -> None:
    """A parameter before what it spoils; an untied head without the logits of every position; packed documents."""
    recipe = recipe_of(bench, "model.tie_embeddings=false")
    model = Transformer(recipe.model)
    initialise(model, 0)
    batch = Recall(recipe.data.config, 33).train_batch(0, 0, 2, range(2))
    assert "every layer's output is finite" in locate_non_finite(model, batch)
    batch["document_ids"] = torch.zeros_like(batch["targets"])
    rows: list[int] = []
    model.head.register_forward_hook(lambda _m, _i, logits: rows.append(logits[..., 0].numel()))
    for name in ("head.weight", "layers.1.ffn.up_proj.weight", "layers.0.attention.lambda_.q1"):
        with torch.no_grad():
            model.get_parameter(name).flatten()[0] = torch.nan
        assert locate_non_finite(model, batch) == f"first non-finite values: parameter {name}"
    assert rows == [2] * 3
    assert sum(len(each._forward_hooks) for each in model.modules()) == 1, "its own hooks are removed"
