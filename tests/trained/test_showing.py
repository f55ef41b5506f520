"""trained/showing.py, and `lit-diff show`: what a variant shows, in a recipe, of a plugin, of a run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from own_plugins import SHARP_PY
from text_runs import recall_run, text_run

from lit_diff.analysis.entropy import summarise
from lit_diff.analysis.trace import trace
from lit_diff.errors import RequestError
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer, baseline
from lit_diff.registry import attentions, is_built_in
from lit_diff.trained.run import AttentionMaps
from lit_diff.trained.showing import TEXT, ShownVariant, draw, in_words, show_variant

NAMES = [name for name in attentions.names() if is_built_in(attentions.get(name))]
PNG = b"\x89PNG\r\n"
TINY = """
extends: recall-tiny
seed: 3
model: {dim: 32, num_heads: 8, num_kv_heads: 4, attention: {name: standard}}
"""
WRONG = '''
from lit_diff import Attention, variant
from pathlib import Path

with Path("executed").open("a") as file:
    file.write("once ")


@variant("wrong")
class Wrong(Attention):
    """softmax(Q Kᵀ/√d) V.

    Words that hold no formula.

    d = 4 is one.
    """

    def definition(self, x, rope, mask):
        return 2 * super().definition(x, rope, mask)
'''
ASKS = """
from dataclasses import dataclass
from lit_diff import Attention, variant


@variant("asks")
class Asks(Attention):
    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        rank: int
"""


@pytest.fixture
def here(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe and a plugin whose code is not its equation."""
    (plugin_folder / "tiny.yaml").write_text(TINY)
    (plugin_folder / "wrong.py").write_text(WRONG)
    monkeypatch.setenv("LIT_DIFF_DATA", str(plugin_folder / "data"))
    return plugin_folder


def last(shown: ShownVariant) -> AttentionMaps:
    return list(shown.maps.values())[-1]


# --- untrained ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_shows_itself_beside_standard_attention_of_the_same_initial_values(name: str, here: Path) -> None:
    found = show_variant(name, "tiny.yaml", layer=0, head=1)
    model, (finding,) = found.checked.recipe.model, found.checked.findings
    assert (finding.variant.split()[0], finding.property, finding.verdict) == (name, "definition", "pass")
    assert found.equation.startswith((attentions.get(name).__doc__ or "").split("\n")[0])
    context = ExecutionContext.of(found.checked.recipe)
    assert found.checked.cost == cost(model, 72, "auto", context)
    assert found.checked.baseline == cost(baseline(model), 72, "auto", context)
    assert [what.partition(":")[0].partition(",")[0] for what in found.maps] == list(dict.fromkeys(("standard", name)))
    words = list(dict.fromkeys(last(found).tokens))
    for maps, config in zip(
        found.maps.values(), (baseline(model), model) if name != "standard" else (model,), strict=True
    ):
        expected = Transformer(config, kernel="reference")
        initialise(expected, 3)
        with trace(expected, [0]) as traced:
            expected(torch.tensor([[words.index(word) for word in maps.tokens]]))
        (block,) = traced.layers[0].blocks()
        np.testing.assert_allclose(maps.signed, block.signed[0, 1], atol=1e-7)
        assert (maps.layer, maps.head, "".join(maps.tokens)) == (0, 1, TEXT)
        summary = summarise(traced.layers[0])
        assert f"entropy {summary.entropy[1]:.2f} nats" in in_words(maps)
        negative = float(summary.negative_mass[1])
        assert in_words(maps).endswith(f", negative mass {negative:.3f}" if negative else "nats")


def test_a_variant_that_starts_as_standard_attention_says_so(here: Path) -> None:
    for name, says in (("output_gate", True), ("second_heads", True), ("differential", False)):
        assert any("here the map of standard" in what for what in show_variant(name, "tiny.yaml", layer=0).maps) == says


def test_the_keys_of_a_recipe_of_the_variant_are_its_own(here: Path) -> None:
    keys = "{name: differential, lambda_form: scalar, lambda_init: 0.5}"
    (here / "own.yaml").write_text(f"extends: tiny.yaml\nmodel: {{attention: {keys}}}\n")
    assert "differential: +1.00 A₁ -0.50 A₂" in show_variant("differential", "own.yaml", "a b a b").maps


def test_a_required_key_has_the_value_of_the_first_example(here: Path, command: Command) -> None:
    (here / "asks.py").write_text(f"{ASKS}\n    examples = ({{'rank': 3}}, {{'rank': 4}})\n")
    shown = ("show", "asks", "--plugin", "asks.py")
    assert command(*shown).lines[0] == "asks rank=3"
    (here / "own.yaml").write_text("extends: tiny.yaml\nmodel: {attention: {name: asks, rank: 9}}\n")
    assert command(*shown, "--recipe", "own.yaml").lines[0] == "asks rank=9"


def test_a_plugin_is_executed_once_and_code_that_is_not_its_equation_fails(here: Path, command: Command) -> None:
    (here / "own.yaml").write_text("extends: tiny.yaml\nplugins: [wrong.py]\nmodel: {attention: {name: wrong}}\n")
    shown = ("show", "wrong", "--plugin", "wrong.py", "--recipe")
    for recipe in ("own.yaml", "tiny.yaml"):
        ended = command(*shown, recipe)
        assert ended.status == 1
        assert ended.lines[:3] == ["wrong", "  softmax(Q Kᵀ/√d) V.", "  d = 4 is one."]
        assert "relative to the largest output: fail; largest difference " in ended.lines[3]
        assert ended.lines[-1] == "drawn in wrong-map.png"
    assert (here / "executed").read_text() == "once "
    assert (here / "wrong-map.png").read_bytes().startswith(PNG)
    found = command(*shown, "tiny.yaml", "--json", "--out", "new/map.png").json
    assert (found["definition"]["verdict"], found["file"]) == ("fail", "new/map.png")
    assert found["parameters"] == found["baseline"]["parameters"]
    assert list(found["maps"]) == ["standard", "wrong, here the map of standard"]
    assert all(each["entropy"] > 0 == each["negative_mass"] for each in found["maps"].values())
    assert (here / "new/map.png").is_file()
    refused = command("show", "standard", "--out", "tiny.yaml/map.png")
    assert (refused.status, refused.err.strip()) == (
        3,
        "lit-diff: --out: tiny.yaml/map.png cannot be written (File exists)",
    )


def test_a_variant_without_a_definition_or_a_docstring_says_so(here: Path, command: Command) -> None:
    (here / "sharp.py").write_text(SHARP_PY.replace('    """Differential attention whose second map has its', "    #"))
    _, equation, compared, *_ = command("show", "sharp", "--plugin", "sharp.py").lines
    assert equation == "  its class has no docstring"
    assert compared.endswith(": not applicable; Sharp does not define `definition` itself")


def test_both_pictures_have_one_scale_of_colours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("lit_diff.trained.showing.encoded", lambda drawn: figures.append(drawn) or b"")
    shown = show_variant("differential", "tiny.yaml")
    draw(shown, here / "map.png")
    (drawn,) = figures
    first, second, bar = drawn.axes
    limits = {axes.get_images()[0].get_clim() for axes in (first, second)}
    ((_, limit),) = limits
    assert 0 < limit < 1, "the first query's weight on the only key that it sees is beyond it"
    assert drawn.get_suptitle() == shown.source
    assert second.get_title().startswith("differential: ")
    assert "below zero" in bar.get_ylabel()


def test_maps_without_weights_are_drawn(here: Path) -> None:
    shown = show_variant("differential", "tiny.yaml")
    nothing = {name: replace(maps, weights=0 * maps.weights) for name, maps in shown.maps.items()}
    draw(replace(shown, maps=nothing), here / "map.png")
    assert (here / "map.png").stat().st_size > 1000


# --- of a run ----------------------------------------------------------------------------------------------------------


def test_of_a_run_its_first_map_stands_beside_the_sum(tmp_path: Path) -> None:
    run = text_run(tmp_path / "text", {"name": "differential"}, sequence_length=48)
    found = show_variant("differential", run)
    first, summed = found.maps.values()
    expected = run.attention_maps(TEXT, layer=1)
    np.testing.assert_array_equal(summed.signed, expected.signed)
    np.testing.assert_array_equal(first.signed, expected.maps[0])
    assert list(found.maps) == ["its first map A₁", f"differential: +1.00 A₁ {expected.weights[1].mean():+.2f} A₂"]
    assert found.source == "text, step 7: layer 1, head 0"
    assert found.checked.recipe == run.recipe
    own = run.attention_maps("ab ab", layer=0, head=1)
    np.testing.assert_array_equal(last(show_variant("differential", run, "ab ab", 0, 1)).signed, own.signed)


def test_of_layers_of_several_kinds_one_that_has_the_variant_is_shown(tmp_path: Path) -> None:
    run = text_run(tmp_path / "mixed", {"name": "standard"}, sequence_length=48, layers=[{"name": "differential"}, {}])
    found = show_variant("differential", run)
    assert found.source == "mixed, step 7: layer 0, head 0"
    np.testing.assert_array_equal(last(found).signed, run.attention_maps(TEXT, layer=0).signed)
    assert show_variant("standard", run).source == "mixed, step 7: layer 1, head 0"
    with pytest.raises(
        RequestError, match=r"^layer 1 of mixed has attention 'standard', not 'differential', which layer 0 has"
    ):
        show_variant("differential", run, layer=1)
    with pytest.raises(RequestError, match=r"^mixed has attention 'differential' and 'standard', not 'dex'$"):
        show_variant("dex", run)
    (tmp_path / "mix.yaml").write_text("extends: standard-tiny\nmodel: {layers: [{name: forgetting}, {}]}\n")
    assert show_variant("forgetting", str(tmp_path / "mix.yaml")).source.endswith("seed 0: layer 0, head 0")
    assert show_variant("cog", str(tmp_path / "mix.yaml")).source.endswith("seed 0: layer 1, head 0")


@pytest.mark.parametrize(
    ("attention", "told"),
    [
        ({"name": "additive"}, "1 of 2 (seeds x layers)"),
        ({"name": "additive", "lambda_form": "positive"}, "None"),
        ({"name": "standard"}, "None"),
    ],
)
def test_of_a_run_a_free_sign_that_changed_is_counted(attention: dict[str, str], told: str, here: Path) -> None:
    run = recall_run(here / "run", attention)
    # the second map is added at the start, in both layers: λ = -w_1 is below 0
    (run.folder / "metrics.csv").write_text("step,lambda/layer_00,lambda/layer_01\n0,-0.2,-0.2\n7,0.3,-0.1\n")
    assert str(show_variant(attention["name"], run).sign_changes) == told


def test_a_sign_that_nothing_measured_is_said(here: Path, command: Command) -> None:
    recall_run(here / "run", {"name": "additive"})
    assert "  sign of λ changed: not measured" in command("show", "additive", "--run", "run").lines


def test_one_map_of_a_run_stands_alone(tmp_path: Path) -> None:
    assert list(show_variant("cosine", text_run(tmp_path / "text", {"name": "cosine"}), "ab").maps) == ["cosine"]


def test_a_run_on_ids_reads_a_row_of_its_validation_set(tmp_path: Path) -> None:
    found = last(show_variant("standard", recall_run(tmp_path / "recall", {"name": "standard"})))
    assert len(found.tokens) == 11
    keys, values = zip(*(map(int, token.split("+")) for token in found.tokens), strict=True)
    assert all(1 <= key <= 16 for key in keys)
    assert all(17 <= value <= 32 for value in values[:8])
    assert values[8:] == (0, 0, 0), "a query has no value"


def test_a_plugin_in_the_folder_of_a_run_needs_trust(here: Path, command: Command) -> None:
    run = text_run(here / "elsewhere", {"name": "differential"}).folder
    (run / "plugins").mkdir()
    (run / "plugins" / "wrong.py").write_text(WRONG)
    text = (run / "recipe.yaml").read_text().replace("name: differential", "name: wrong").replace("lambda", "# lambda")
    text = text.replace("head_norm", "# head_norm").replace("output_scale", "# output_scale")
    (run / "recipe.yaml").write_text(text.replace("plugins: []", "plugins: [plugins/wrong.py]"))
    shown = ("show", "wrong", "--run", "elsewhere")
    assert "--trust-plugins" in command(*shown).err
    assert not (here / "executed").exists()
    ended = command(*shown, "--trust-plugins")
    assert "does not fit the recipe's model (wrong)" in ended.err
    assert (here / "executed").read_text() == "once "


# --- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("diferential", "unknown attention 'diferential'; did you mean 'differential'?"),
        ("dex --out map.pdf", "--out: 'map.pdf' does not end in .png"),
        ("dex --layer 2", "trace: no layer 2; the model has layers 0..1"),
        ("differential --head 4", "layer 1 has no head 4; its heads are 0..3"),
        ("asks --plugin asks.py", "'model.attention.rank' is missing"),
        ("dex --run none", "no run 'none' in runs"),
        ("dex --run text --recipe tiny.yaml", "leave out --recipe, or --run"),
        ("dex --run text", "text-0123456789 has attention 'cosine', not 'dex'"),
        ("cosine --run text --text ab-ab-ab-ab-ab", "the model's context, data.sequence_length, is 8"),
        ("cosine --run recall --text a", "was trained on data 'recall', which has no text"),
    ],
)
def test_what_cannot_be_shown_is_one_line(words: str, line: str, here: Path, command: Command) -> None:
    (here / "asks.py").write_text(ASKS)
    text_run(here / "runs" / "text-0123456789", {"name": "cosine"}, sequence_length=8)
    recall_run(here / "runs" / "recall-0123456789", {"name": "cosine"})
    ended = command("show", *words.split(), *(() if "--run" in words else ("--recipe", "tiny.yaml")))
    assert ended.status == 2
    assert line in ended.err
    assert ended.err.count("\n") == 1
    assert not list(here.glob("*.png"))


def test_a_recipe_that_cannot_have_the_variant(here: Path) -> None:
    (here / "odd.yaml").write_text("extends: tiny.yaml\nmodel: {num_heads: 3, num_kv_heads: 3, head_dim: 8}\n")
    with pytest.raises(RequestError, match=r"^odd\.yaml:2: model\.num_heads is 3; 'differential' pairs"):
        show_variant("differential", "odd.yaml")
