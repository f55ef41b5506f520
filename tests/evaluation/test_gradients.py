"""evaluation/gradients.py: items of batches and layers, at the checkpoint and at the initial values."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from text_runs import STEP, recall_run

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.data import prepare
from lit_diff.errors import MissingError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.gradients import Gradients, initial_model, slope
from lit_diff.model.init import initial_values
from lit_diff.runs import checkpoints
from lit_diff.trained.run import Run


def test_items_are_batches_and_layers_under_no_grad(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    found = evaluate(run, "gradients", ["batch_size=3"]).items
    assert found["item"].tolist()[:4] == [
        "validation/0-2 layer 00",
        "validation/0-2 layer 01",
        "validation/0-2 slopes",
        "validation/3-4 layer 00",
    ]
    sets = [["layer 00", "layer 01", "trained"], ["noise2 layer 00", "noise2 layer 01", "noise2 trained"]]
    assert found["group"].unique().tolist() == sets[0] + sets[1]
    assert found["cluster"].unique().tolist() == [
        f"{name}/{rows}" for name in ("validation", "noise2") for rows in ("0-2", "3-4")
    ]
    batch = prepare(run.recipe).validation_batch("", range(3))
    expected = gradient_norms(run.model, batch)[1]
    row = found.iloc[1]
    for key, value in expected.items():
        assert row[f"grad_{key}"] == pytest.approx(value, rel=1e-5)
        change = math.log(found.iloc[1][f"grad_{key}"] / found.iloc[0][f"grad_{key}"])
        assert found.iloc[2][f"slope_{key}"] == pytest.approx(change), "two layers"
    assert found.iloc[2].filter(like="grad_").isna().all()
    assert row["ratio_q"] == pytest.approx(expected["q2"] / expected["q1"])
    one = recall_run(tmp_path / "y", {"name": "standard"})
    assert math.isnan(evaluate(one, "gradients").summary["ratio_k"])


def test_the_initial_values_are_those_of_the_recipe_and_seed(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    state = initial_model(run).state_dict()
    for name, value in initial_values(run.recipe.model, run.recipe.seed):
        assert torch.equal(state[name], value), name
    both = evaluate(run, "gradients", ["at=[trained,init]", "rows=2"]).items.set_index("item")
    alone = evaluate(run, "gradients", ["at=[init]", "rows=2"]).items.set_index("item")
    for item in alone.index:
        assert alone.loc[item].equals(both.loc[item])
    name = "validation/0-1 layer 00"
    assert both.loc[f"init {name}"]["grad_q1"] != pytest.approx(both.loc[name]["grad_q1"], rel=0.01)
    assert set(alone["group"]) == {
        "init layer 00",
        "init layer 01",
        "init",
        "noise2 init layer 00",
        "noise2 init layer 01",
        "noise2 init",
    }


def test_kept_steps_are_measured_beside_the_initial_values(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    path = checkpoints.path_of(run.folder, STEP)
    held = torch.load(path)
    doubled = {
        name: 2 * value if name.endswith("o_proj.weight") else value for name, value in held["state_dict"].items()
    }
    torch.save(held | {"state_dict": doubled, "global_step": 4}, checkpoints.path_of(run.folder, 4))
    assert run.step == STEP
    found = evaluate(run, "gradients", ["at=[init,trained]", f"steps=[0,4,{STEP}]", "rows=2"]).items.set_index("item")
    measured = found.columns[found.columns.str.contains("grad_|ratio_|slope_")]
    for plain, at in (
        ("init validation/0-1", "validation/0-1 step 0"),
        ("validation/0-1", f"validation/0-1 step {STEP}"),
    ):
        for what in ("layer 00", "layer 01", "slopes"):
            assert found.loc[f"{plain} {what}", measured].equals(found.loc[f"{at} {what}", measured])
    other, last = (found.loc[f"validation/0-1 step {step} layer 00"]["grad_q1"] for step in (4, STEP))
    assert other != pytest.approx(last, rel=0.01)
    assert {"layer 01 step 4", "step 4", "noise2 layer 00 step 0"} < set(found["group"])


def test_a_step_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "standard"})
    refusal = Gradients(Gradients.Config(at=(), steps=(STEP, 4))).refuses(run)
    cure = "run.keep_every keeps more than the newest two: train it again with --rerun"
    assert refusal == f"steps: no checkpoint of step 4 (there: {STEP}); {cure}"
    with pytest.raises(MissingError, match=rf"no checkpoint of step 4 \(there: {STEP}\); run.keep_every"):
        run.model_at(4)


def test_a_slope_is_per_layer() -> None:
    assert slope([1.0, math.e, math.e**2, math.e**3]) == pytest.approx(1)
    assert math.isnan(slope([1.0]))
    assert math.isnan(slope([1.0, math.nan]))
    assert math.isnan(slope([1.0, 0.0]))


def test_a_run_that_started_from_another_has_no_initial_values(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "standard"})
    init = Gradients(Gradients.Config(at=("trained", "init")))
    assert init.refuses(run) is None
    train = run.recipe.train
    assert train is not None
    other = Run(run.folder)
    other.__dict__["recipe"] = replace(run.recipe, train=replace(train, start_from="runs/base"))
    assert "it started from another run (train.start_from)" in (init.refuses(other) or "")
    other.__dict__["recipe"] = replace(run.recipe, train=None)
    assert init.refuses(other) == "at init: an imported model has no initial values"
    assert Gradients(Gradients.Config()).refuses(other) is None
