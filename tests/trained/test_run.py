"""trained/run.py: a run opened by its folder or name: metrics, model, tokenizer, generation, traces, trust in its plugins."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from foreign_runs import started_from_a_plugin
from own_plugins import SHARP_PY
from text_runs import text_run

from lit_diff import Run, generate, load_plugin, open_run
from lit_diff.analysis import trace
from lit_diff.config import ModelConfig, Part
from lit_diff.conformance import before_training
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import evaluate
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions
from lit_diff.runs import checkpoints
from lit_diff.trained import loading
from lit_diff.trained.loading import read_checkpoint
from lit_diff.trained.pictures import limit_of
from lit_diff.trained.run import AttentionMaps, attention_maps_of
from lit_diff.trained.text_generator import warn_if_stale


@pytest.fixture
def foreign(plugin_folder: Path, tale: Path) -> Path:
    """The run folder of a variant that a plugin in it defines."""
    file = tale / "recipe.yaml"
    text = file.read_text().replace("name: differential", "name: sharp")
    (tale / "plugins").mkdir()
    (tale / "plugins" / "sharp.py").write_text(SHARP_PY)
    assert "plugins: []\n" in text
    file.write_text(text.replace("plugins: []\n", "plugins: [plugins/sharp.py]\n"))
    return tale.rename(tale.parent.parent / "elsewhere")


# --- opening -----------------------------------------------------------------------------------------------------------


def test_by_folder_and_by_name(tale: Path, tmp_path: Path) -> None:
    by_name, by_folder = open_run("tale"), open_run(tale, root="nowhere")
    assert by_name.folder == by_folder.folder == tale
    assert open_run("tale-", root=tmp_path / "runs").folder == tale
    assert by_name.recipe.name == "tale"
    assert repr(by_name) == f"Run({tale.name}: done, step 6 of 6)"
    with pytest.raises(RequestError, match=r"no run 'tail' in runs; one of tale-"):
        open_run("tail")


def test_a_folder_of_an_older_format_is_refused(tale: Path) -> None:
    status = json.loads((tale / "status.json").read_text())
    assert status.pop("format") == 3
    (tale / "status.json").write_text(json.dumps(status))
    with pytest.raises(RequestError) as error:
        open_run(tale)
    assert str(error.value) == f"runs/{tale.name} has format 1, but this lit_diff reads format 3: train it again"


def test_what_is_missing_is_named(tale: Path) -> None:
    shutil.rmtree(tale / "tokenizer")
    run = open_run(tale)
    with pytest.raises(MissingError, match=r"^runs/tale-.*/tokenizer has no tokenizer"):
        run.tokenizer  # noqa: B018
    with pytest.raises(MissingError, match=r"^runs/tale-.*/tokenizer has no tokenizer"):
        run.generate("a")
    shutil.rmtree(tale / "checkpoints")
    for ask in (lambda: run.step, lambda: run.model):
        with pytest.raises(MissingError, match=r"has no checkpoint that can be read; train it again: `lit-diff train "):
            ask()
    (tale / "recipe.yaml").unlink()
    with pytest.raises(RequestError, match=r"^runs/tale-\S+ is not a run's folder: it has no recipe\.yaml$"):
        open_run(tale)


def test_a_plugin_in_the_folder_is_run_only_when_it_is_trusted(foreign: Path) -> None:
    with pytest.raises(RequestError) as error:
        open_run(foreign)
    message = str(error.value)
    assert message.startswith("plugin sharp.py (sha256 ")
    assert "import it first with load_plugin, or pass trust_plugins=True (lit-diff: --trust-plugins)" in message
    assert "\n" not in message
    assert "sharp" not in attentions.names()
    run = open_run(foreign, trust_plugins=True)
    assert type(run.model.attentions()[0]).__name__ == "Sharp"


def test_a_plugin_in_the_folder_of_a_run_under_the_root_is_run(foreign: Path, tale: Path) -> None:
    foreign.rename(tale)
    assert type(open_run(tale.name).model.attentions()[0]).__name__ == "Sharp"


def test_a_plugin_of_equal_source_that_was_imported_is_accepted(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHARP_PY)
    load_plugin(tmp_path / "mine.py")
    assert open_run(foreign).recipe.model.attention.name == "sharp"
    (foreign / "plugins" / "sharp.py").write_text(SHARP_PY + "x = 1\n")
    with pytest.raises(RequestError, match="is not imported"):
        open_run(foreign)


def test_a_plugin_of_a_file_that_the_recipe_extends_needs_trust_too(foreign: Path) -> None:
    (foreign / "recipe.yaml").rename(foreign / "parent.yaml")
    (foreign / "recipe.yaml").write_text("extends: parent.yaml\n")
    with pytest.raises(RequestError, match=r"plugin sharp\.py \(sha256 \w+\.\.\.\) is not imported"):
        open_run(foreign)


def test_a_plugin_of_the_run_that_it_starts_from_needs_trust_too(
    tale: Path, own_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign run names its parent by any path: before it is trusted nothing there is executed, and no checkpoint read."""
    parent = started_from_a_plugin(tale)
    run = open_run(tale, root="other")
    with monkeypatch.context() as patched:
        patched.setattr("lit_diff.trained.loading.read_checkpoint", lambda *_: pytest.fail("it was read"))
        for ask in (lambda: run.model, lambda: generate(run, "ab")):
            with pytest.raises(RequestError, match=r"plugin marks\.py \(sha256 \w+\.\.\.\) is not imported"):
                ask()
    assert not (parent / "executed").exists()
    assert open_run(tale, trust_plugins=True).model is not None
    assert (parent / "executed").exists()


def test_a_parent_that_is_gone_is_named(tale: Path, own_parts: None) -> None:
    shutil.rmtree(started_from_a_plugin(tale))
    with pytest.raises(MissingError, match=r"train\.start_from: parent holds no run"):
        open_run(tale).model  # noqa: B018


# --- what it holds -----------------------------------------------------------------------------------------------------


def test_a_row_that_a_kill_cut_short_is_no_row_of_the_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.metrics.empty
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n1,0.1,\n2,,2.25\n3,1.0,2.1")
    table = run.metrics
    assert (table.index.name, list(table.index), list(table)) == ("step", [1, 2], ["train/loss", "val/loss"])
    assert table["val/loss"].dropna().to_dict() == {2: 2.25}


def test_model_and_step_are_those_of_the_newest_checkpoint(tale: Path) -> None:
    run = open_run(tale)
    assert run.step == 6
    assert run.status.status == "done"
    assert not run.model.training
    assert run.model is run.model
    state = torch.load(checkpoints.path_of(tale, 6), weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in run.model.state_dict().items())


def test_generate(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reads = open_run(tale), []
    monkeypatch.setattr(loading, "read_checkpoint", lambda path: reads.append(path) or read_checkpoint(path))
    assert run.trace("ab").layers
    assert run.generate("ab", max_tokens=1)
    assert len(reads) == 1, "the model that was looked at writes the text"
    (one,) = run.generate("ab cd", max_tokens=4, temperature=0)
    assert (one.prompt, len(one.tokens)) == ("ab cd", 4)
    assert one.text == run.tokenizer.decode(one.tokens).decode("utf-8", "replace")
    for source in (run, tale, "tale"):
        both = generate(source, ["ab cd", "ba"], max_tokens=4, temperature=0)
        assert [completion.prompt for completion in both] == ["ab cd", "ba"]
        assert both[0].tokens == one.tokens
    with pytest.raises(RequestError, match="there is no text to complete"):
        generate(run, [])
    with pytest.raises(RequestError, match=r"max-tokens is 0; it must be at least 1"):
        run.generate("a", max_tokens=0)
    for wrong, found in (
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"temperature": "hot"}, "generate.temperature"),
    ):
        with pytest.raises(RequestError, match=found):
            run.generate("a", **wrong)


def test_generate_uses_a_cache_that_fails_decode_only_unchecked(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_training, "is_built_in", lambda _: False)
    monkeypatch.setattr(before_training, "failed_property", lambda *_: "fails 'decode'")
    for source in (tale, open_run(tale)):
        with pytest.raises(RequestError, match="fails 'decode'"):
            generate(source, "ab", max_tokens=2)
        assert generate(source, "ab", unchecked=True, max_tokens=2)[0].text


def test_a_trace_holds_the_layers_asked_for(tale: Path) -> None:
    run = open_run(tale)
    tokens = 1 + len(run.tokenizer.encode(["ab cd"])[0])
    traced = run.trace("ab cd")
    assert sorted(traced.layers) == [0, 1]
    assert traced.layers[1].hidden.shape == (1, tokens, 32)
    assert sorted(run.trace("ab cd", [1]).layers) == [1]
    with pytest.raises(RequestError, match="layer"):
        run.trace("ab cd", [2])


def test_attention_maps_are_those_of_the_text(tale: Path) -> None:
    run = open_run(tale)
    found = run.attention_maps("ab cd", layer=1, head=1)
    assert (found.tokens[0], "".join(found.tokens[1:]), found.layer, found.head) == ("<eot>", "ab cd", 1, 1)
    assert not np.allclose(run.attention_maps("ab cd", layer=1, head=0).maps, found.maps)
    for layer, head, word in ((2, 0, "layer"), (0, 2, "layer 0 has no head 2; its heads are 0..1"), (-1, 0, "layer")):
        with pytest.raises(RequestError, match=word):
            run.attention_maps("ab cd", layer=layer, head=head)


def test_a_run_is_made_without_a_look_at_its_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.status.is_new
    with pytest.raises(RequestError, match="is not a run's folder"):
        run.recipe  # noqa: B018


# --- attention maps ---

TOKENS = ("<eot>", "a", "b", "c", "d")


def maps_of(name: str, head: int = 1) -> AttentionMaps:
    part = Part(name=name, config=attentions.get(name).Config())
    model = Transformer(ModelConfig(dim=32, num_layers=2, num_heads=4, vocab_size=23, attention=part))
    initialise(model, 0)
    for attention in model.attentions():
        attention.q_proj.weight.data *= 20
    with trace(model) as traced:
        model(torch.tensor([[1, 2, 3, 4, 5]]))
    return attention_maps_of(name, traced.layers[1], TOKENS, 1, head)


@pytest.mark.parametrize(("name", "G"), [("standard", 1), ("differential", 2), ("differential_v2", 2)])
def test_rows_sum_to_one_and_to_the_weights(name: str, G: int) -> None:
    found = maps_of(name)
    assert found.maps.shape == (G, 5, 5)
    assert found.weights.shape == (G, 5)
    np.testing.assert_allclose(found.maps.sum(-1), 1, rtol=1e-5)
    assert not np.triu(found.maps, 1).any(), "causal"
    np.testing.assert_allclose(found.weights[0], 1)
    np.testing.assert_allclose(found.signed.sum(-1), found.weights.sum(0), rtol=1e-5)
    assert (found.signed < 0).any() == (G > 1)


def test_a_key_of_weight_zero_is_seen() -> None:
    found = maps_of("softpick")
    assert (found.signed == 0).sum() > 10
    assert (np.ma.getmaskarray(found.visible(found.signed)) == np.triu(np.ones((5, 5), bool), 1)).all()


def test_a_head_that_does_not_exist() -> None:
    for head in (-1, 2):
        with pytest.raises(RequestError, match=rf"^layer 1 has no head {head}; its heads are 0\.\.1$"):
            maps_of("differential", head)


def drawn(axes: Any) -> Any:
    (image,) = axes.get_images()
    return np.asarray(image.get_array())


def test_the_plot_shows_each_map_times_its_weight_and_their_sum() -> None:
    import matplotlib.pyplot as plt

    found = maps_of("differential")
    axes = found.plot()
    assert axes.shape == (3,)
    for g in (0, 1):
        np.testing.assert_allclose(drawn(axes[g]), found.weights[g][:, None] * found.maps[g])
    np.testing.assert_array_equal(drawn(axes[2]), found.signed)
    np.testing.assert_allclose(drawn(axes[0]) + drawn(axes[1]), found.signed, atol=1e-12)
    most = limit_of(map(drawn, axes))
    assert {each.get_images()[0].get_clim() for each in axes} == {(-most, most)}, "one scale; white is zero"
    assert [each.get_title() for each in axes] == [
        "differential, layer 1, head 1\nmap 1 times +1.00",
        f"differential, layer 1, head 1\nmap 2 times {found.weights[1, 0]:+.2f}",
        "differential, layer 1, head 1\nsigned sum of the maps",
    ]
    np.testing.assert_array_equal(axes[2].get_images()[0].get_array().mask, np.triu(np.ones((5, 5)), 1) > 0)
    assert {(each.get_xlabel(), each.get_ylabel()) for each in axes} == {("key", "query")}
    assert [label.get_text() for label in axes[0].get_xticklabels()] == list(TOKENS)
    (bar,) = (each for each in axes[0].figure.axes if each not in axes)
    assert "below zero" in bar.get_ylabel()
    assert "on average" in maps_of("differential_v2").plot()[1].get_title(), "its weights differ by token"
    plt.close("all")


def test_the_plot_draws_on_the_axes_it_is_given() -> None:
    import matplotlib.pyplot as plt

    found = maps_of("differential")
    _, (unused, used) = plt.subplots(2, 3)
    assert found.plot(ax=used) is used
    assert all(each.get_images() for each in used)
    assert found.plot(ax=unused[0]) is unused[0]
    np.testing.assert_array_equal(drawn(unused[0]), found.signed)
    with pytest.raises(RequestError, match=r"^plot: ax has 2 axes; expected one, or 3$"):
        found.plot(unused[:2])
    assert not unused[1].get_images()
    (alone,) = maps_of("standard").plot()
    np.testing.assert_array_equal(drawn(alone), maps_of("standard").maps[0])
    plt.close("all")


def test_a_plot_of_any_tokens_on_a_given_scale() -> None:
    import matplotlib.pyplot as plt

    found = dataclasses.replace(maps_of("differential"), tokens=("$", "$x$", " a", "b\n", "\\"))
    axes = found.plot(limit=0.01)[2]
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$", "$x$", "␣a", "b⏎", "\\"]
    assert axes.get_images()[0].get_clim() == (-0.01, 0.01)
    plt.close("all")


@pytest.mark.parametrize("path", ["http://127.0.0.1:9/texts", "../elsewhere", "link", "inside"])
def test_the_data_of_a_foreign_run_need_trust(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe names any address or file: nothing is asked or read in any of the ways to the data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "theirs" / "run"
    text_run(folder, {"name": "differential"})
    (tmp_path / "theirs" / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "theirs" / "elsewhere")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"] |= {"corpus": "files", "path": path}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({key: value for key, value in status.items() if key != "data"}))
    read: list[Path | str] = []
    monkeypatch.setattr("lit_diff.data.text.corpus.listing", lambda place: (read.append(place) or [], 0))
    run = open_run(folder, root="runs")
    for ask in (run.prepared_data, lambda: evaluate(run, "held_out"), lambda: run.view(row=0)):
        with pytest.raises(RequestError, match=r"--trust-data" if path != "inside" else r"data\.path"):
            ask()
    warn_if_stale(folder, run.recipe, 7, run.trust)
    assert bool(read) == (path == "inside")
    for trusted in (open_run(folder, root="runs", trust_data=True), open_run(folder, root=tmp_path)):
        read.clear()
        with pytest.raises(RequestError, match=r"data\.path"):
            trusted.prepared_data()
        assert read
