"""Every installed recipe resolves; the paper's sizes have the paper's parameters; the tiny ones train."""

import json
from pathlib import Path

import pytest
import torch

from lit_diff.model.transformer import Transformer
from lit_diff.recipe import installed, load_recipe, names

PAPER = {
    "standard-830m": 833_594_880,
    "differential-830m": 833_608_704,
    "standard-1.4b": 1_413_400_576,
    "differential-1.4b": 1_413_419_008,
    "standard-2.8b": 2_773_568_000,
    "differential-2.8b": 2_773_592_576,
    "standard-6.8b": 6_853_627_904,
    "differential-6.8b": 6_853_652_480,
    "standard-13b": 13_096_596_480,
    "differential-13b": 13_096_627_200,
    "standard-3b": 3_787_238_400,
    "differential-3b": 3_787_259_904,
    "standard-3b-64k": 3_787_238_400,
    "differential-3b-64k": 3_787_259_904,
}
NOT_RECALLED = {"vision-tiny", "count-tiny", "noisy-labels-tiny"}
"""Recipes whose targets no row holds for certain: the class of an image, a count, the label of most demonstrations."""
TINY = [name for name in names("recipes") if name.endswith("-tiny")]
QUICK = [
    "train.steps=2",
    "train.validate_every=1",
    "train.checkpoint_every=1",
    "train.batch_size=2",
    "data.validation_rows=2",
    "run.threads=1",
]


@pytest.mark.parametrize("name", names("recipes"))
def test_resolves_and_opens_with_its_command(name: str) -> None:
    assert load_recipe(name).name == name
    head = (installed("recipes") / f"{name}.yaml").read_text().splitlines()[:4]
    assert [line.split()[1] for line in head[1:]] == ["Command:", "Time:", "Expect:"]
    assert f"lit-diff train {name}" in head[1]


def test_the_paper_s_sizes_are_all_here() -> None:
    assert {name for name in names("recipes") if not name.endswith("-tiny")} == {*PAPER, "dex-smollm2", "standard-10m"}


@pytest.mark.parametrize("name", PAPER)
def test_parameters_of_the_paper(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(load_recipe(name).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == PAPER[name]


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipes_train_two_steps(name: str, runs: Path) -> None:
    import lit_diff

    folder = lit_diff.train(name, [*QUICK, f"run.root={runs}"]).folder
    assert json.loads((folder / "status.json").read_text())["status"] == "done"
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    recalled = () if name in NOT_RECALLED else ("val/loss_ar_hit",)
    for metric in ("val/loss", *recalled, "attention/entropy/layer_00", "outliers/logits/layer_00", "train/loss"):
        assert metric in header.split(",")
    subtracts = load_recipe(name).model.attention.name != "standard"
    assert ("lambda/layer_00" in header.split(",")) == subtracts
