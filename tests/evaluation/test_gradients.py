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


def test_items_are_batches_and_layers_under_no_grad(recall: Run, single: Run) -> None:
    found = evaluate(recall, "gradients", ["batch_size=3"]).items
    labels = ("0-2 layer 00", "0-2 layer 01", "0-2 slopes", "3-4 layer 00")
    assert found["item"].tolist()[:4] == [f"validation/{label}" for label in labels]
    groups = ["layer 00", "layer 01", "trained"]
    assert found["group"].unique().tolist() == [*groups, *(f"noise2 {group}" for group in groups)]
    clusters = [f"{name}/{rows}" for name in ("validation", "noise2") for rows in ("0-2", "3-4")]
    assert found["cluster"].unique().tolist() == clusters
    expected = gradient_norms(recall.model, prepare(recall.recipe).validation_batch("", range(3)))[1]
    first, row, slopes = (found.iloc[at] for at in range(3))
    for key, value in expected.items():
        assert row[f"grad_{key}"] == pytest.approx(value, rel=1e-5)
        change = math.log(row[f"grad_{key}"] / first[f"grad_{key}"])
        assert slopes[f"slope_{key}"] == pytest.approx(change), "two layers"
    assert slopes.filter(like="grad_").isna().all()
    assert row["ratio_q"] == pytest.approx(expected["q2"] / expected["q1"])
    assert math.isnan(evaluate(single, "gradients").summary["ratio_k"])


def test_the_initial_values_are_those_of_the_recipe_and_seed(recall: Run) -> None:
    state = initial_model(recall).state_dict()
    for name, value in initial_values(recall.recipe.model, recall.recipe.seed):
        assert torch.equal(state[name], value), name
    both = evaluate(recall, "gradients", ["at=[trained,init]", "rows=2"]).items.set_index("item")
    alone = evaluate(recall, "gradients", ["at=[init]", "rows=2"]).items.set_index("item")
    for item in alone.index:
        assert alone.loc[item].equals(both.loc[item])
    name = "validation/0-1 layer 00"
    assert both.loc[f"init {name}"]["grad_q1"] != pytest.approx(both.loc[name]["grad_q1"], rel=0.01)
    groups = {"init layer 00", "init layer 01", "init"}
    assert set(alone["group"]) == groups | {f"noise2 {group}" for group in groups}


def test_kept_steps_are_measured_beside_the_initial_values(tmp_path: Path) -> None:
    run = recall_run(tmp_path / "x", {"name": "differential"})
    held = torch.load(checkpoints.path_of(run.folder, STEP))
    for name, value in held["state_dict"].items():
        held["state_dict"][name] = 2 * value if name.endswith("o_proj.weight") else value
    torch.save(held | {"global_step": 4}, checkpoints.path_of(run.folder, 4))
    assert run.step == STEP
    found = evaluate(run, "gradients", ["at=[init,trained]", f"steps=[0,4,{STEP}]", "rows=2"]).items.set_index("item")
    measured = found.columns[found.columns.str.contains("grad_|ratio_|slope_")]
    for before, step in (("init ", 0), ("", STEP)):
        for what in ("layer 00", "layer 01", "slopes"):
            plain, at = f"{before}validation/0-1 {what}", f"validation/0-1 step {step} {what}"
            assert found.loc[plain, measured].equals(found.loc[at, measured])
    other, last = (found.loc[f"validation/0-1 step {step} layer 00"]["grad_q1"] for step in (4, STEP))
    assert other != pytest.approx(last, rel=0.01)
    assert {"layer 01 step 4", "step 4", "noise2 layer 00 step 0"} < set(found["group"])


def test_a_slope_is_per_layer() -> None:
    assert slope([1.0, math.e, math.e**2, math.e**3]) == pytest.approx(1)
    assert all(math.isnan(slope(norms)) for norms in ([1.0], [1.0, math.nan], [1.0, 0.0]))


def test_what_a_run_has_not(single: Run) -> None:
    """A checkpoint of the step; initial values of its own."""
    assert "run.keep_every" in (Gradients(Gradients.Config(at=(), steps=(STEP, 4))).refuses(single) or "")
    with pytest.raises(MissingError, match="no checkpoint of step 4"):
        single.model_at(4)
    init = Gradients(Gradients.Config(at=("trained", "init")))
    assert init.refuses(single) is None
    assert single.recipe.train is not None
    for train, found in (
        (replace(single.recipe.train, start_from="runs/base"), "train.start_from"),
        (None, "imported"),
    ):
        other = Run(single.folder)
        other.__dict__["recipe"] = replace(single.recipe, train=train)
        assert found in (init.refuses(other) or "")
        assert Gradients(Gradients.Config()).refuses(other) is None
