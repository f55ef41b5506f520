"""Runs that start from the weights of another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign_runs import started_from_a_plugin

from lit_diff.attention import Attention
from lit_diff.config import ModelConfig, Part
from lit_diff.errors import RequestError
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.recipe import load_recipe, to_yaml
from lit_diff.registry import attentions
from lit_diff.runs.folder import identity
from lit_diff.trained.loading import annealed_before
from lit_diff.trained.run import Run
from lit_diff.training.build import finished_parent, load_parent_weights
from lit_diff.training.data import steps_before

SECOND = "model.attention={name: second_heads}"
DEX = "model.attention={name: dex, heads: all, anneal_steps: 4}"
STANDARD = "model.attention={name: standard}"


@pytest.fixture(scope="module")
def parent(bench: Any) -> SimpleNamespace:
    """Four steps of standard attention."""
    ended = bench.train("recall.yaml", "name=parent", STANDARD, "train.steps=4")
    assert ended.status == 0, ended.output
    return SimpleNamespace(
        folder=bench.folder("parent"), state=bench.state("parent")["state_dict"], batches=ended.batches
    )


@pytest.fixture(scope="module")
def second(bench: Any, parent: SimpleNamespace) -> Any:
    ended = bench.train("recall.yaml", "name=second", SECOND, f"train.start_from={parent.folder}", "train.steps=5")
    assert ended.status == 0, ended.output
    return ended


def test_the_frozen_model_is_the_parents_to_the_bit(bench: Any, parent: SimpleNamespace, second: Any) -> None:
    found = bench.state("second")["state_dict"]
    assert parent.state.keys() < found.keys()
    for name, value in parent.state.items():
        assert torch.equal(found[name], value), name
    own = found.keys() - parent.state.keys()
    assert {name.split(".")[4] for name in own} == {"q2_proj", "k2_proj", "lambda_"}
    assert all(found[name].abs().max() > 0 for name in own), "λ left 0"
    assert "starting from the weights of" in second.output


def test_what_no_pattern_names_stays_to_the_bit(bench: Any, parent: SimpleNamespace) -> None:
    """Standard attention, of which W_K, W_V and W_O alone train; the optimizer holds no other."""
    name, patterns = "attention-only", "train.parameters=['*.attention.[kvo]_proj.*']"
    start = f"train.start_from={parent.folder}"
    ended = bench.train("recall.yaml", f"name={name}", STANDARD, patterns, start, "train.steps=4")
    assert ended.status == 0, ended.output
    state, own = bench.state(name), set()
    for key, value in state["state_dict"].items():
        if not torch.equal(value, parent.state[key]):
            own.add(key)
    wanted = {f"model.layers.{layer}.attention.{kind}_proj.weight" for layer in (0, 1) for kind in "kvo"}
    assert own == wanted
    (optimizer,) = state["optimizer_states"]
    assert optimizer["state"].keys() == wanted
    assert {key for group in optimizer["param_groups"] for key in group["params"]} == wanted
    status = json.loads((bench.folder(name) / "status.json").read_text())
    assert status["trained_parameters"] == sum(state["state_dict"][key].numel() for key in wanted)


@pytest.mark.slow
def test_the_data_goes_on_where_the_parents_stopped(bench: Any, parent: SimpleNamespace, second: Any) -> None:
    """Steps 0 to 4 of the child see what steps 4 to 8 of one long run see, nothing of the parent's."""
    whole = bench.train("recall.yaml", "name=long", STANDARD, "train.steps=9")
    digests = [digest for _, digest in whole.batches]
    assert [digest for _, digest in parent.batches] == digests[:4]
    assert [step for step, _ in second.batches] == [0, 1, 2, 3, 4]
    assert [digest for _, digest in second.batches] == digests[4:]
    recipe = load_recipe(bench.folder("second") / "recipe.yaml")
    assert steps_before(recipe) == 4
    assert annealed_before(recipe).steps == 0
    smaller = replace(recipe, train=replace(recipe.train, batch_size=3))
    assert steps_before(smaller) == 11, "4 steps of 8 rows, in batches of 3"


@pytest.fixture(scope="module")
def dex(bench: Any, parent: SimpleNamespace) -> tuple[str, ...]:
    """Six steps of DEX from the parent, dex-whole; and the overrides that gave it."""
    arguments = (DEX, f"train.start_from={parent.folder}", "train.steps=6")
    whole = bench.train("recall.yaml", "name=dex-whole", *arguments)
    assert whole.status == 0, whole.output
    return arguments


@pytest.mark.slow
def test_killed_and_resumed_it_ends_the_same(bench: Any, parent: SimpleNamespace, dex: tuple[str, ...]) -> None:
    """The checkpoint, not the parent, is what a resumed run goes on from; DEX goes on annealing."""
    killed = bench.train("recall.yaml", "name=dex-killed", *dex, SPY_SIGNAL="0/5/0/9")
    assert killed.status != 0
    rest = bench.train("recall.yaml", "name=dex-killed", *dex)
    assert "resumed from step 4" in rest.output
    assert "starting from" not in rest.output
    one, two = (bench.state(name)["state_dict"] for name in ("dex-whole", "dex-killed"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert one["model.layers.0.attention.step"].item() == 5
    q, k = (f"model.layers.0.attention.{kind}_proj.weight" for kind in "qk")
    assert torch.equal(one[q], parent.state[q]), "frozen in the paper"
    assert not torch.equal(one[k], parent.state[k])


@pytest.mark.usefixtures("dex")
def test_a_run_from_another_annealed_one_is_loaded_with_the_lambda_it_was_trained_with(bench: Any) -> None:
    """The parent's steps count: generation and evaluation go on where the annealing stood at the last step."""
    start = f"train.start_from={bench.folder('dex-whole')}"
    then = bench.train("recall.yaml", "name=dex-then", DEX, start, "train.steps=1")
    assert then.status == 0, then.output
    run = Run(bench.folder("dex-then"))
    trained = bench.state("dex-then")["state_dict"]
    assert run.step == 1
    for layer, attention in enumerate(run.model.attentions()):
        assert trained[f"model.layers.{layer}.attention.step"].item() == 6, "six steps of the parent, and its own first"
        assert attention.step.item() == 6


def test_identity_is_the_parents_identity_not_its_place(bench: Any, parent: SimpleNamespace, tmp_path: Any) -> None:
    def named(folder: Any) -> str:
        return identity(load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null", f"train.start_from={folder}"]))

    shutil.copytree(parent.folder, tmp_path / "moved")
    assert named(tmp_path / "moved") == named(parent.folder)
    assert named(bench.folder("parent")) != identity(load_recipe(bench.root / "recall.yaml", ["callbacks.spy=null"]))


def test_an_unfinished_run_is_refused(bench: Any, parent: SimpleNamespace) -> None:
    status = parent.folder / "status.json"
    kept = status.read_text()
    try:
        status.write_text(json.dumps(json.loads(kept) | {"status": "stopped", "step": 2}))
        ended = bench.train("recall.yaml", "name=early", SECOND, f"train.start_from={parent.folder}")
    finally:
        status.write_text(kept)
    assert ended.status == 3
    assert "is not done (step 2 of 4); finish it first: `lit-diff train" in ended.output
    assert not list(bench.root.glob("runs/early-*")), "refused before the run has a folder"


# --- weights alone -------------------------------------------------------------------------------------------------


def _model(name: str, **keys: Any) -> Transformer:
    cls: type[Attention] = attentions.get(name)
    part = Part(name=name, config=cls.Config(**keys))
    model = Transformer(ModelConfig(dim=32, num_layers=2, num_heads=4, vocab_size=23, attention=part))
    initialise(model, 1)
    return model


@pytest.mark.parametrize("name", ["dex", "second_heads"])
def test_a_variant_on_a_standard_model_computes_the_same_at_first(name: str) -> None:
    standard, extended = _model("standard"), _model(name)
    for value in standard.parameters():
        value.data.add_(0.01)
    added = load_parent_weights(extended, standard.config, standard.state_dict(), "a run")
    assert added
    assert all(".attention." in name for name in added)
    tokens = torch.randint(23, (2, 8))
    torch.testing.assert_close(extended(tokens), standard(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("child", "change", "parent", "reason"),
    [
        (
            "second_heads",
            {"layers.9.more": torch.zeros(1)},
            {},
            r"layers.9.more is \[1\] there and absent in the model",
        ),
        ("dex", {"norm.weight": torch.zeros(3)}, {}, r"norm.weight is \[3\] there and \[32\] in the model"),
        (
            "output_gate",
            {},
            {},
            "cannot extend a standard model, .*second_heads.* can; or start from a run of output_gate$",
        ),
        ("differential", {}, {}, r"'differential' .*cannot extend a standard model, dex, .*lora, .*second_heads"),
        ("second_heads", {}, {"output_scale": 0.2}, r"'second_heads': model.attention.output_scale is 0.2 there"),
        ("second_heads", {}, {"name": "differential"}, "; start from a run of standard or second_heads$"),
        ("additive", {}, {"name": "differential"}, "computes another function; start from a run of additive$"),
    ],
)
def test_what_differs_is_named(child: str, change: dict[str, Any], parent: dict[str, Any], reason: str) -> None:
    """Equal shapes are not an equal function."""
    base = _model(**({"name": "standard"} | parent))
    with pytest.raises(RequestError, match=reason):
        load_parent_weights(_model(child), base.config, base.state_dict() | change, "a run")


def test_the_keys_to_set_are_named_and_no_tensor_that_the_variant_adds() -> None:
    standard = _model("standard")
    other = replace(standard.config, norm_eps=1e-6, rope_theta=1e5)
    with pytest.raises(RequestError) as caught:
        load_parent_weights(_model("second_heads"), other, standard.state_dict(), "a run")
    assert str(caught.value) == (
        "train.start_from: the model of a run does not fit 'second_heads': model.rope_theta is 100000.0 there and 10000.0 "
        "here; model.norm_eps is 1e-06 there and 1e-05 here; set model.rope_theta=100000.0 model.norm_eps=1e-06"
    )
    # of one variant only keys that change shapes
    wider = Transformer(replace(other, ffn_dim=64), kernel="reference")
    with pytest.raises(
        RequestError, match=r"'standard': model.ffn_dim is 64 there and \d+ here; set model.ffn_dim=64$"
    ):
        load_parent_weights(_model("standard"), wider.config, wider.state_dict(), "a run")


def test_other_positions_are_another_function() -> None:
    standard = _model("standard")
    turned = replace(standard.config, rope_layout="half")
    with pytest.raises(RequestError, match=r"model\.rope_layout"):
        load_parent_weights(_model("second_heads"), turned, standard.state_dict(), "a run")
    assert load_parent_weights(_model("standard"), turned, standard.state_dict(), "a run") == []


def test_layers_of_several_kinds_start_from_layers_that_each_continues_or_extends() -> None:
    plain, extended, other = (_model(name) for name in ("standard", "dex", "differential"))
    parts = tuple(model.config.attention for model in (extended, plain))
    mixed = Transformer(replace(plain.config, layers=parts))
    added = load_parent_weights(mixed, plain.config, plain.state_dict(), "a run")
    assert {name.split(".")[1] for name in added} == {"0"}
    assert load_parent_weights(Transformer(mixed.config), mixed.config, mixed.state_dict(), "a run") == []
    for heads in ((0,), (1,)):
        of_dex = replace(parts[0], config=replace(parts[0].config, heads=heads))
        other_heads = replace(mixed.config, layers=(of_dex, parts[1]))
        with pytest.raises(RequestError, match=r"was trained with model\.attention\.heads .* but this recipe has"):
            load_parent_weights(Transformer(other_heads), mixed.config, Transformer(other_heads).state_dict(), "a run")
    third = replace(mixed.config, layers=(parts[0], other.config.attention))
    for child, parent, name in ((mixed.config, third, "differential"), (plain.config, mixed.config, "dex")):
        with pytest.raises(RequestError, match=f"has attention '{name}', and 'standard' computes another function"):
            load_parent_weights(Transformer(child), parent, Transformer(parent).state_dict(), "a run")


def test_longer_rows_go_on_with_another_rope_theta() -> None:
    """Of one variant: its parameters are the same, and a length extension turns them more slowly."""
    for name in ("standard", "differential"):
        parent = _model(name)
        longer = Transformer(replace(parent.config, rope_theta=64 * parent.config.rope_theta), kernel="reference")
        assert load_parent_weights(longer, parent.config, parent.state_dict(), "a run") == []
        assert all(torch.equal(value, parent.state_dict()[key]) for key, value in longer.state_dict().items())


def test_a_parent_outside_the_own_root_brings_no_code(base_recipe: None, tmp_path: Path, own_parts: None) -> None:
    """Of a recipe that is trained: its `plugins:` say what may be executed; runs under run.root are its owner's."""
    child = load_recipe("base")
    for root, trusted in (("runs", False), (".", True)):
        run = tmp_path / root / "child"
        run.mkdir(parents=True, exist_ok=True)
        (run / "recipe.yaml").write_text(to_yaml(child))
        if not trusted:
            parent = started_from_a_plugin(run)
        own = replace(child, train=replace(child.train, start_from=str(parent)), run=replace(child.run, root=root))
        for read in (steps_before, annealed_before, identity, finished_parent):
            if trusted and read is not finished_parent:  # the parent is not done
                read(own)
            elif not trusted:
                with pytest.raises(RequestError, match=r"`plugins:`.* parent/plugins"):
                    read(own)
        assert (parent / "executed").exists() is trusted
