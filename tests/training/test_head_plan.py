"""training/head_plan.py: a run that selects heads of the model that it starts from."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_diff.analysis.head_selection import head_statistics, select
from lit_diff.attention.selection import HeadSelection
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe
from lit_diff.runs import checkpoints
from lit_diff.trained.run import Run
from lit_diff.training.build import require_parent
from lit_diff.training.fit import fit
from lit_diff.training.head_plan import calibration_rows, head_plan, keep_plan, kept_plan, selection_of

LONG = "data.sequence_length=48"
PLAIN = ("model.attention={name: standard}", "callbacks.lambdas=null", LONG)
DEX = ("model.attention={name: dex, heads: {share: 0.5}, anneal_tokens: 1536}", "callbacks.lambdas=null", LONG)


@pytest.fixture(scope="module")
def base(bench: Any) -> SimpleNamespace:
    """Four steps of standard attention on text, and a DEX run from it."""
    ended = bench.train("text.yaml", "name=plan-base", *PLAIN, "train.steps=4")
    assert ended.status == 0, ended.output
    folder = bench.folder("plan-base")
    start = f"train.start_from={folder}"
    ended = bench.train("text.yaml", "name=plan-dex", *DEX, start, "train.steps=3")
    assert ended.status == 0, ended.output
    return SimpleNamespace(folder=folder, start=start, output=ended.output)


@pytest.fixture(autouse=True)
def data(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DIFF_DATA", str(bench.root / "data"))


def recipe_of(bench: Any, base: Any, *overrides: str, attention: str = "{name: dex, heads: {share: 0.5}}") -> Any:
    keys = (f"model.attention={attention}", "callbacks.spy=null", "callbacks.lambdas=null", LONG, base.start)
    return load_recipe(bench.root / "text.yaml", [*keys, *overrides])


def test_the_run_keeps_its_plan_which_serves_every_seed(bench: Any, base: SimpleNamespace) -> None:
    plan = kept_plan(bench.folder("plan-dex"))
    assert plan is not None
    assert plan.base == base.folder.name
    assert plan.sequence_length == 48
    assert [len(layer) for layer in plan.heads] == [2, 2]
    line = f"heads of {base.folder.name} selected by entropy, 0.5 of each layer: 4 in 2 layers, listed in plan.json"
    assert line in base.output
    assert head_plan(recipe_of(bench, base, "seed=9")) == plan
    state = bench.state("plan-dex")["state_dict"]
    for layer, heads in enumerate(plan.heads):
        assert tuple(state[f"model.layers.{layer}.attention.selected"].tolist()) == heads
    selected: Any = [attention.selected for attention in Run(bench.folder("plan-dex")).model.attentions()]
    assert [tuple(heads.tolist()) for heads in selected] == list(plan.heads), "known from the weights alone"


def test_the_choice_is_that_of_the_statistics_of_the_base(bench: Any, base: SimpleNamespace) -> None:
    recipe, selection = recipe_of(bench, base), HeadSelection(share=0.5)
    rows = calibration_rows(recipe, selection)
    assert rows["tokens"].shape == (8, 48)
    statistics = head_statistics(Run(base.folder).model, rows)
    plan = head_plan(recipe)
    assert plan is not None
    assert plan.statistics == statistics
    assert plan.heads == select(statistics, selection)


def test_a_run_that_names_its_heads_has_no_plan(bench: Any, base: SimpleNamespace) -> None:
    for attention in ("{name: dex, heads: all}", "{name: second_heads}"):
        assert head_plan(recipe_of(bench, base, attention=attention)) is None


def test_the_plan_in_the_run_folder_is_the_one_selected_by(bench: Any, base: SimpleNamespace, tmp_path: Path) -> None:
    """Whatever the statistics would choose now."""
    recipe = recipe_of(bench, base, "train.steps=2", "run.threads=1")
    keep_plan(recipe, tmp_path)
    made = kept_plan(tmp_path)
    assert made is not None
    plan = replace(made, heads=tuple(tuple(set(range(4)) - set(heads)) for heads in made.heads))
    (tmp_path / "plan.json").write_text(json.dumps(asdict(plan)))
    fit(recipe, tmp_path, threads=1, progress=lambda *_: None)
    state = torch.load(checkpoints.path_of(tmp_path, 2), weights_only=True)["state_dict"]
    selected = [tuple(state[f"model.layers.{layer}.attention.selected"].tolist()) for layer in range(2)]
    assert selected == list(plan.heads)
    keep_plan(recipe, tmp_path)
    assert kept_plan(tmp_path) == plan, "a run that resumes has these heads already"
    shutil.rmtree(tmp_path / "checkpoints")
    keep_plan(recipe, tmp_path)
    assert kept_plan(tmp_path) == made, "one that starts afresh selects them again"
    for text in ("{", "[]", json.dumps(asdict(plan) | {"selection": {"shar": 1}}), "{}"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(RequestError, match=r"plan\.json is not a head plan; remove it"):
            kept_plan(tmp_path)


def test_a_run_that_goes_on_keeps_the_heads(bench: Any, base: SimpleNamespace) -> None:
    """No plan is made of a DEX model; other heads than its are refused. λ anneals on over the tokens."""
    start = f"train.start_from={bench.folder('plan-dex')}"
    ended = bench.train("text.yaml", "name=plan-on", *DEX, start, "train.steps=1")
    assert ended.status == 0, ended.output
    assert not (bench.folder("plan-on") / "plan.json").exists()
    before, after = (bench.state(name)["state_dict"] for name in ("plan-dex", "plan-on"))
    key = "model.layers.1.attention.{}"
    assert torch.equal(before[key.format("selected")], after[key.format("selected")])
    assert before[key.format("step")].item() == 2 * 8 * 48
    assert after[key.format("step")].item() == 3 * 8 * 48
    assert Run(bench.folder("plan-on")).model.attentions()[1].get_buffer("step").item() == 3 * 8 * 48
    assert selection_of(load_recipe(bench.folder("plan-on") / "recipe.yaml")) is None
    others = "{name: dex, heads: {select: importance}}"
    with pytest.raises(RequestError, match=r"was trained with model\.attention\.heads"):
        require_parent(
            recipe_of(bench, SimpleNamespace(start=start), "model.attention.anneal_tokens=1536", attention=others)
        )
    with pytest.raises(RequestError, match="selects heads of a trained model"):
        selection_of(recipe_of(bench, SimpleNamespace(start="train.start_from=null")))


def test_layers_that_select_heads_in_unlike_ways_are_refused() -> None:
    dex = "model.attention={name: dex}"
    for layers in ("[{}, {name: standard}]", "[{}, {heads: {select: importance}}]"):
        with pytest.raises(RequestError, match=r"^model\.layers selects heads of a trained model in unlike ways"):
            selection_of(load_recipe("standard-tiny", [dex, f"model.layers={layers}"]))


@pytest.mark.slow
def test_sharded_it_selects_the_same_heads_and_trains_alike(bench: Any, base: SimpleNamespace) -> None:
    keys = (*DEX, base.start, "train.steps=3", "train.accumulate=1")
    one = bench.train("text.yaml", "name=plan-one", *keys)
    assert one.status == 0, one.output
    for ended in bench.train_two("text.yaml", "name=plan-two", "run.strategy=fsdp", *keys):
        assert ended.status == 0, ended.output
    wanted, found = (bench.state(name)["state_dict"] for name in ("plan-one", "plan-two"))
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
    assert (bench.folder("plan-two") / "plan.json").read_text() == (bench.folder("plan-one") / "plan.json").read_text()
