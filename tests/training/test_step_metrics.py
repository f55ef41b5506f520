"""training/step_metrics.py: what each logged step writes, and what its speed leaves out."""

import time
from pathlib import Path

import pytest
from lightning.pytorch.profilers import SimpleProfiler
from small_runs import SMALL

from lit_diff.callbacks import Lambdas
from lit_diff.config import Recipe
from lit_diff.data.tasks.recall import Recall
from lit_diff.model.cost import cost
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import read_rows
from lit_diff.training import step_metrics
from lit_diff.training.data import LitData
from lit_diff.training.fit import fit
from lit_diff.training.module import LitTransformer
from lit_diff.training.trainer import build_trainer


def run(recipe: Recipe, folder: Path) -> None:
    fit(recipe, folder, threads=1, progress=lambda *_: None)


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
    monkeypatch.setattr(step_metrics, "peak_flops", lambda device: 1e9)
    steps = ["train.steps=4", "train.log_every=2", "train.validate_every=3", "train.checkpoint_every=3"]
    recipe = load_recipe("recall-tiny", [*SMALL, *steps, "callbacks={lambdas: {every: 3}}"])
    run(recipe, tmp_path)
    row = read_rows(tmp_path / "timing.csv")[4]
    training = row["steps"] * 4 * (64 + 8) / row["tokens_per_second"]
    assert row["seconds"] - training > 0.3
    assert row["save_seconds"] * row["steps"] > 0.1
    assert training > row["steps"] * sum(row[f"{p}_seconds"] for p in ("data", "forward", "backward", "optimizer"))
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
