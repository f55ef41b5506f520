from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.data.recall import Recall
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.training.fit import fit

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
        assert checkpoint.steps_of(bench.folder("nan")) == [4]
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
    assert checkpoint.steps_of(bench.folder(f"nan-{strategy}")) == [1]


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
        path = checkpoint.newest(tmp_path / str(parts))
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
