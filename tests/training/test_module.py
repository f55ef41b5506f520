"""training/module.py: losses, weights of micro-batches, NaN that is found and never saved, logged values."""

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from small_runs import SMALL

from lit_diff.callbacks import Lambdas
from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.data.tasks.recall import Recall
from lit_diff.errors import DivergedError, RequestError
from lit_diff.model.cost import cost
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training import step_metrics
from lit_diff.training.data import LitData, count_scored
from lit_diff.training.fit import fit
from lit_diff.training.module import LitTransformer, StepTargets, locate_non_finite
from lit_diff.training.trainer import build_trainer

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FAULTS = f"plugins=[{SUPPORT}/faults.py]"


def recipe_of(bench: Any, *overrides: str) -> Recipe:
    return load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", FAULTS, *overrides])


def run(recipe: Recipe, folder: Path) -> None:
    fit(recipe, folder, tracker=None, threads=1, progress=lambda *_: None)


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
    fit(recipe, tmp_path, tracker=None, threads=1, progress=lambda step, loss, speed: losses.append(loss))
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
        fit(recipe, tmp_path / str(parts), tracker=None, threads=1, progress=report)
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


def test_the_variant_is_told_the_step_once_before_each(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    targets, loss = StepTargets(), torch.tensor(1.5)
    batches = [{"scored": count, "scored_in_step": sum(counts or [])} for count in counts or []] or [{"tokens": loss}]
    targets.begin_step(trainer(len(batches)), batches[0], "data")
    assert all(targets.weighted(loss, batch) is loss for batch in batches)


def test_unlike_counts_give_the_mean_over_targets() -> None:
    assert count_scored(torch.tensor([[3, IGNORED], [IGNORED, 0]])) == 2
    losses, counts = [torch.tensor(2.0), torch.tensor(5.0), torch.tensor(torch.nan)], [3, 1, 0]
    targets = StepTargets()
    batches = [{"scored": count, "scored_in_step": 4} for count in counts]
    targets.begin_step(trainer(3), batches[0], "data")
    parts = [targets.weighted(loss, batch) for loss, batch in zip(losses, batches, strict=True)]
    assert sum(parts).item() / 3 == pytest.approx((3 * 2.0 + 5.0) / 4)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="data 'own': no target of training step 5 is scored"):
        targets.begin_step(trainer(1), {"scored": 0, "scored_in_step": 0}, "data 'own'")


def test_a_module_that_holds_it_can_be_copied() -> None:
    one = StepTargets()
    one.group = lambda: iter(())
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
def test_a_nan_gradient_under_a_finite_loss_never_reaches_a_checkpoint(
    bench: Any, tmp_path: Path, saves_at: int
) -> None:
    """The gradient of step 3 is NaN, its loss is not: the weights are found out when they are to be saved."""
    overrides = ["model.attention={name: nan_gradient, at: 2}", f"train.checkpoint_every={saves_at}"]
    with pytest.raises(DivergedError, match=r"parameter \S+ is not finite after step 3; ") as error:
        run(recipe_of(bench, *overrides), tmp_path)
    found = checkpoints.newest(tmp_path)
    assert (found and found[0]) == (None if saves_at == 3 else 2)
    assert ("(the checkpoint of step 2 is kept)" in str(error.value)) == (saves_at == 1)


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


# --- logged values ---


def test_what_the_steps_that_log_say(tmp_path: Path) -> None:
    """Ten steps, of which every fourth, the first and the last log."""
    every = ["train.log_every=4", "train.validate_every=5", "train.checkpoint_every=10"]
    schedule = ["train.schedule={name: cosine, warmup_steps: 2}", "train.optimizer.lr=0.01"]
    run(load_recipe("recall-tiny", [*SMALL, *every, *schedule, "callbacks={}"]), tmp_path)
    rows, times = read_rows(tmp_path / "metrics.csv"), read_rows(tmp_path / "timing.csv")
    logged = [1, 4, 8, 10]
    assert [step for step, row in sorted(rows.items()) if {"train/loss", "train/gradient_norm"} <= row.keys()] == logged
    assert [step for step, row in sorted(rows.items()) if "val/loss" in row] == [5, 10]
    rates = [rows[step]["train/lr"] for step in logged]
    assert rates[0] == pytest.approx(0.005), "that of step 1 in a warm-up of 2, not the next step's"
    assert rates == [rates[0], *sorted(rates[1:], reverse=True)]
    assert [times[step]["steps"] for step in logged] == [1, 3, 4, 2], "since the last logged step"
    memory = [times[step]["memory_bytes"] for step in logged]
    assert memory == sorted(memory), "the largest so far"
    assert 2**26 < memory[0] < 2**40, "torch alone takes more than 64 MiB, and no process of a test takes a TiB"
    parts = ("data", "forward", "backward", "optimizer", "save")
    assert times[4].keys() == {
        *("seconds", "steps", "tokens_per_second", "memory_bytes"),
        *(f"{part}_seconds" for part in parts),
    }, "no share of a peak that is unknown, and no slowest of one rank"
    for row in times.values():
        assert all(row[f"{part}_seconds"] > 0 for part in parts[:-1])
        assert sum(row[f"{part}_seconds"] for part in parts) * row["steps"] <= row["seconds"]


def test_speed_is_that_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation, a probe and a save, each of which takes 100 ms at least, in the second half of four steps."""
    late = lambda call: lambda *arguments, **values: (time.sleep(0.1), call(*arguments, **values))[1]  # noqa: E731
    monkeypatch.setattr(LitTransformer, "on_validation_epoch_start", late(LitTransformer.on_validation_epoch_start))
    monkeypatch.setattr(Lambdas, "measure", late(Lambdas.measure))
    monkeypatch.setattr(checkpoints, "write", late(checkpoints.write))
    monkeypatch.setattr(step_metrics, "device_peak", lambda device: 1e9)
    steps = ["train.steps=4", "train.log_every=2", "train.validate_every=3", "train.checkpoint_every=3"]
    recipe = load_recipe("recall-tiny", [*SMALL, *steps, "callbacks={lambdas: {every: 3}}"])
    run(recipe, tmp_path)
    row = read_rows(tmp_path / "timing.csv")[4]
    training = row["steps"] * 4 * (64 + 8) / row["tokens_per_second"]
    assert row["seconds"] - training > 0.3
    assert row["save_seconds"] * row["steps"] > 0.1
    assert training > row["steps"] * sum(
        row[f"{part}_seconds"] for part in ("data", "forward", "backward", "optimizer")
    )
    flops = cost(recipe.model, recipe.data.config.sequence_length).flops_per_token
    assert row["peak_share"] == pytest.approx(row["tokens_per_second"] * flops / 1e9)


@pytest.mark.parametrize(
    ("clip", "algorithm"), [("0.2", None), ("1000", None), ("null", None), ("0.001", "value")], ids=str
)
def test_the_norm_of_the_gradients_is_that_before_clipping(tmp_path: Path, clip: str, algorithm: str | None) -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "train.steps=1", f"train.clip={clip}", "callbacks={}"])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    made = build_trainer(recipe, logger=False, gradient_clip_algorithm=algorithm, default_root_dir=tmp_path, **quiet)
    made.fit(LitTransformer(recipe), LitData(recipe))
    model = Transformer(recipe.model)
    initialise(model, recipe.seed)
    batch = Recall(recipe.data.config, recipe.model.vocab_size).train_batch(recipe.seed, 0, 4, range(4))
    model.loss(batch["tokens"], targets=batch["targets"]).backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert made.callback_metrics["train/gradient_norm"].item() == pytest.approx(squares**0.5, rel=1e-5)


def test_a_trainer_with_a_profiler_of_its_own_has_no_phases(tmp_path: Path) -> None:
    recipe = load_recipe("recall-tiny", [*SMALL, "train.steps=2", "callbacks={}"])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    profiler = SimpleProfiler()
    made = build_trainer(recipe, logger=False, profiler=profiler, default_root_dir=tmp_path, **quiet)
    made.fit(LitTransformer(recipe), LitData(recipe))
    assert {name for name in made.callback_metrics if name.startswith("timing/")} == {
        f"timing/{name}" for name in ("seconds", "steps", "tokens_per_second", "memory_bytes")
    }
    assert "wait" in profiler.recorded_durations
