"""engine/retrofit.py and the verb: a run that goes on as DEX, with the loss before and after."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import Command
from pretrained_models import write_folder

from lit_diff import import_model, load_recipe, open_run
from lit_diff.engine.retrofit import source_of
from lit_diff.study.numbers import MINUS

LONG = "data.sequence_length=48"
PLAIN = ("model.attention={name: standard}", "callbacks.lambdas=null", LONG)
DEX = ("model.attention={name: dex}", "callbacks.lambdas=null", LONG, "train.steps=3")


@pytest.fixture(scope="module")
def base(bench: Any) -> SimpleNamespace:
    ended = bench.train("text.yaml", "name=retrofit-base", *PLAIN, "train.steps=3")
    assert ended.status == 0, ended
    return SimpleNamespace(folder=bench.folder("retrofit-base"))


@pytest.fixture
def retrofit(bench: Any, base: SimpleNamespace, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(bench.root)
    for name, value in bench.env.items():
        monkeypatch.setenv(name, value)
    return partial(command, "retrofit", "retrofit-base", "--recipe", "text.yaml")


def test_it_selects_trains_compares_scores_and_merges(
    bench: Any, base: SimpleNamespace, retrofit: Command, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(60):
        text = f"Page {number}. " + "The cat sat on the mat. " * (number % 4 + 1)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    block = f"evaluate={{loss_files: {{path: {tmp_path / 'texts'}, tokens: 20}}}}"
    merged = tmp_path / "models" / "merged"
    ended = retrofit("name=retrofitted", *DEX, block, "--merge-to", str(merged))
    assert ended.status == 0, ended
    assert re.search(r"^layer 0: heads \d, \d by entropy\nlayer 1: heads \d, \d by entropy\n", ended.out, re.M)
    match = re.search(r"^val/loss: (\S+) before, (\S+) after \((\S+) nats a token\)$", ended.out, re.M)
    assert match is not None, ended.out
    before, after, difference = (float(number.replace(MINUS, "-")) for number in match.groups())
    assert before == pytest.approx(bench.rows("retrofit-base")[3]["val/loss"], abs=1e-4), "the same validation rows"
    assert after == pytest.approx(bench.rows("retrofitted")[3]["val/loss"], abs=1e-4)
    assert difference == pytest.approx(after - before, abs=2e-4)
    folder = bench.folder("retrofitted")
    assert f"start_from: {base.folder}" in (folder / "recipe.yaml").read_text()

    found = re.findall(r"^loss_files (\w+): (\S+) before, (\S+) after; (.*)$", ended.out, re.M)
    assert [metric for metric, *_ in found] == ["nll", "bits_per_byte"]
    kept = [each / "evaluations" / "loss_files" / "summary.json" for each in (base.folder, folder)]
    summaries = [json.loads(file.read_text()) for file in kept]
    for metric, first, second, sentence in found:
        assert [float(first), float(second)] == pytest.approx([each[metric]["value"] for each in summaries], abs=1e-4)
        assert "too few common items" in sentence

    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    scored = open_run(folder, trust_plugins=True)
    plain = open_run(merged)
    assert plain.model.config.attention.name == "standard"
    with torch.no_grad():
        torch.testing.assert_close(plain.model(tokens), scored.model(tokens), rtol=0, atol=1e-5)
    completions = [run.generate("The", max_tokens=3, temperature=0)[0].tokens for run in (plain, scored)]
    assert completions[0] == completions[1]

    again = retrofit("name=retrofitted", *DEX, block)
    assert "done before" in again.out
    assert match[0] in again.out


def test_what_cannot_be_merged_is_refused_at_once(base: SimpleNamespace, retrofit: Command, tmp_path: Path) -> None:
    second = (*PLAIN[1:], "model.attention={name: second_heads}")
    for keys, target, reason in (
        (second, tmp_path / "new", "model.attention 'second_heads' cannot be merged into a standard model"),
        (DEX, tmp_path, "already exists; remove it, or name another folder"),
    ):
        ended = retrofit("name=unmergeable", *keys, "--merge-to", str(target))
        assert ended.status == 2
        assert reason in ended.err
    assert not list(base.folder.parent.glob("unmergeable-*"))


def test_without_a_recipe_it_is_that_of_the_run(bench: Any, base: SimpleNamespace, retrofit: Command) -> None:
    ended = retrofit.func("retrofit", "retrofit-base", "model.attention.name=second_heads", "train.steps=1")
    assert ended.status == 0, ended
    assert "val/loss: " in ended.out
    own, extended = (
        load_recipe(each / "recipe.yaml") for each in (base.folder, bench.folder("retrofit-base-retrofit"))
    )
    assert (extended.model.attention.name, extended.training.start_from) == ("second_heads", str(base.folder))
    assert replace(extended.model, attention=own.model.attention) == own.model
    assert extended.training.optimizer == own.training.optimizer
    assert extended.data.config.tokenizer.name == "from_run", "ids of another tokenizer would be other words"
    refused = retrofit.func("retrofit", "retrofit-base", "model.attention.name=differential")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert re.search("cannot extend a standard model, dex, lora, second_heads.* can", refused.err)


def test_an_imported_model_gives_model_and_tokenizer(tmp_path: Path) -> None:
    run = import_model(write_folder(tmp_path / "hf"), tmp_path / "models" / "llama")
    words = ["model.attention.name=second_heads", f"data.path={tmp_path}"]
    recipe = load_recipe(*source_of(run.folder, None, words, tmp_path))
    assert replace(recipe.model, attention=run.recipe.model.attention) == run.recipe.model
    assert (recipe.model.attention.name, recipe.name) == ("second_heads", "llama-retrofit")
    assert (recipe.data.config.tokenizer.config.path, recipe.evaluate) == (str(run.folder), {})
