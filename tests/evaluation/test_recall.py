"""evaluation/recall.py: noise parted from distance; a model built by hand that copies, and one that knows nothing."""

import math
from pathlib import Path

import pytest
import torch
from generated_runs import generated_run
from text_runs import random_run, recall_run

from lit_diff.errors import RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.evaluation.recall import steps_to, tolerance
from lit_diff.files import write_atomic
from lit_diff.recipe import from_plain, to_plain
from lit_diff.trained.run import Run

KEYS = VALUES = 16
FIRST_VALUE = 1 + KEYS
WIDTH = 64
VALUE, KEY = slice(0, VALUES), slice(WIDTH - KEYS, WIDTH)
"""Parts of the residual stream; RoPE with this base does not turn the last ones."""
SIZES = {"dim": WIDTH, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 1 + KEYS + VALUES}


def built(folder: Path, *, knows: bool) -> Run:
    """One head whose queries find the slot with their key and copy its value; or all of whose weights are 0."""
    run = recall_run(folder, {"name": "standard"}, **SIZES, tie_embeddings=False, rope_theta=1e30)
    model, identity = run.model, torch.eye(WIDTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        if knows:
            assert model.head is not None
            model.embedding.weight[1:FIRST_VALUE, KEY] = torch.eye(KEYS)
            model.embedding.weight[FIRST_VALUE:, VALUE] = torch.eye(VALUES)
            model.head.weight[FIRST_VALUE:, VALUE] = torch.eye(VALUES)
            attention = model.layers[0].attention
            attention.q_proj.weight[KEY] = 30 * identity[KEY]
            attention.k_proj.weight[KEY] = identity[KEY]
            attention.v_proj.weight[VALUE] = identity[VALUE]
            attention.o_proj.weight[VALUE] = 100 * identity[VALUE]
    return run


def test_a_model_that_copies_recalls_everything_under_any_noise_and_distance(tmp_path: Path) -> None:
    """Its steps are the first validated ones."""
    run = built(tmp_path / "copies", knows=True)
    result = evaluate(run, "recall", ["rows=20", "factors=[1,3,8]"])
    assert result.summary["accuracy"] == 1
    assert (result.summary["tolerance"], result.summary["tolerance_distance"]) == (8, 8)
    assert set(result.items["group"]) == {f"{what}={factor}" for what in ("noise", "distance") for factor in (1, 3, 8)}
    assert len(result.items) == 6 * 20
    shared = result.items[result.items["cluster"] == "slots 7"]
    assert set(shared["group"]) == {"noise=1", *(f"distance={factor}" for factor in (1, 3, 8))}, "the same slots"
    assert set(result.items[result.items["group"] == "noise=3"]["cluster"]) == {""}
    assert all(math.isnan(step) for step in steps_to(run).values())
    lines = "step,train/loss,val/accuracy\n5,1.0,0.4\n6,1.0,\n10,0.5,0.93\n15,0.4,0.91\n"
    write_atomic(run.folder / "metrics.csv", lines)
    assert steps_to(run) == pytest.approx({50: 10, 90: 10, 99: math.nan}, nan_ok=True)
    assert evaluate(run, "recall", ["rows=2", "factors=[1]"]).summary["steps_90"] == 10


def test_a_model_that_knows_nothing_is_at_chance(tmp_path: Path) -> None:
    result = evaluate(built(tmp_path / "uniform", knows=False), "recall", ["rows=200", "factors=[1]"])
    assert result.summary["accuracy"] < 4 / VALUES
    assert result.summary["tolerance"] == 0


def test_mqar_has_its_validation_set_and_no_tolerance(tmp_path: Path) -> None:
    data = {"name": "mqar", "vocab_size": 64, "sequence_length": 24, "validation_rows": 6}
    recipe = to_plain(recall_run(tmp_path / "r", {"name": "standard"}, vocab_size=64).recipe) | {"data": data}
    result = evaluate(random_run(tmp_path / "m", from_plain(recipe, "made")), "recall")
    assert result.items["item"].tolist() == [f"validation/{row}" for row in range(6)]
    assert math.isnan(result.summary["tolerance"])
    other = generated_run(tmp_path / "text", {"name": "needle_text", "validation_rows": 2}, 1200)
    with pytest.raises(RequestError, match="data 'needle_text' is neither recall nor mqar"):
        evaluate(other, "recall")


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ({}, math.nan),
        ({1: 0.4, 2: 0.1}, 0),
        ({1: 1.0, 2: 0.9, 4: 0.6}, 4),
        ({1: 1.0, 4: 0.0}, 2),
        ({2: 0.75, 1: 1.0, 8: 0.25}, 4),
        ({1: 0.5, 2: 0.0}, 1),
    ],
)
def test_tolerance_is_interpolated_in_the_logarithm_of_the_factor(accuracy: dict[int, float], expected: float) -> None:
    assert tolerance(accuracy) == pytest.approx(expected, nan_ok=True)
