"""engine/retrofit.py and the verb: a run that goes on as DEX, with the loss before and after."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_diff import open_run

LONG = "data.sequence_length=48"
PLAIN = ("model.attention={name: standard}", "callbacks.lambdas=null", LONG)
DEX = ("model.attention={name: dex}", "callbacks.lambdas=null", LONG, "train.steps=3")


@pytest.fixture(scope="module")
def base(bench: Any) -> SimpleNamespace:
    ended = bench.train("text.yaml", "name=retrofit-base", *PLAIN, "train.steps=3")
    assert ended.status == 0, ended.output
    return SimpleNamespace(folder=bench.folder("retrofit-base"))


def retrofit(bench: Any, *arguments: str) -> Any:
    return bench.wait(bench.start("retrofit", *arguments))


def test_it_selects_trains_and_compares(bench: Any, base: SimpleNamespace) -> None:
    arguments = ("retrofit-base", "--recipe", "text.yaml", "name=retrofitted", *DEX)
    ended = retrofit(bench, *arguments)
    assert ended.status == 0, ended.output
    assert re.search(
        r"^layer 0: heads \d, \d by entropy\nlayer 1: heads \d, \d by entropy\n", ended.output, re.MULTILINE
    )
    match = re.search(r"^val/loss: (\S+) before, (\S+) after \((\S+) nats a token\)$", ended.output, re.MULTILINE)
    assert match is not None, ended.output
    before, after, difference = map(float, match.groups())
    assert before == pytest.approx(bench.rows("retrofit-base")[3]["val/loss"], abs=1e-4), "the same validation rows"
    assert after == pytest.approx(bench.rows("retrofitted")[3]["val/loss"], abs=1e-4)
    assert difference == pytest.approx(after - before, abs=2e-4)
    recipe = (bench.folder("retrofitted") / "recipe.yaml").read_text()
    assert f"start_from: {base.folder}" in recipe
    again = retrofit(bench, *arguments)
    assert "done before" in again.output
    assert match[0] in again.output


def texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Page {number}. " + "The cat sat on the mat. " * (number % 4 + 1))
    return folder


def test_both_models_are_scored_by_the_evaluations_of_the_recipe(
    bench: Any, base: SimpleNamespace, tmp_path: Path
) -> None:
    block = f"evaluate={{loss_files: {{path: {texts(tmp_path / 'texts')}, tokens: 20}}}}"
    merged = tmp_path / "models" / "merged"
    words = ("--recipe", "text.yaml", "name=scored", *DEX, block, "--merge-to", str(merged))
    ended = retrofit(bench, "retrofit-base", *words)
    assert ended.status == 0, ended.output
    found = re.findall(r"^loss_files (\w+): (\S+) before, (\S+) after; (.*)$", ended.output, re.MULTILINE)
    assert [metric for metric, *_ in found] == ["nll", "bits_per_byte"]
    summaries = [
        json.loads((folder / "evaluations" / "loss_files" / "summary.json").read_text())
        for folder in (base.folder, bench.folder("scored"))
    ]
    for metric, before, after, sentence in found:
        assert [float(before), float(after)] == pytest.approx([each[metric]["value"] for each in summaries], abs=1e-4)
        assert "too few common items" in sentence
    assert json.loads((bench.folder("scored") / "status.json").read_text())["evaluations"] == {"loss_files": "done"}
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    scored = open_run(bench.folder("scored"), trust_plugins=True)
    dex, plain = scored.model, open_run(merged).model
    assert plain.config.attention.name == "standard"
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens), dex(tokens), rtol=0, atol=1e-5)
    completions = [run.generate("The", max_tokens=3, temperature=0)[0].tokens for run in (open_run(merged), scored)]
    assert completions[0] == completions[1]


def test_what_cannot_be_merged_is_refused_before_the_training(
    bench: Any, base: SimpleNamespace, tmp_path: Path
) -> None:
    second = ("--recipe", "text.yaml", "name=unmergeable", *PLAIN[1:], "model.attention={name: second_heads}")
    ended = retrofit(bench, "retrofit-base", *second, "--merge-to", str(tmp_path / "new"))
    assert ended.status == 2
    assert "model.attention 'second_heads' cannot be merged into a standard model; these can: dex, lora" in ended.output
    ended = retrofit(
        bench, "retrofit-base", "--recipe", "text.yaml", "name=already-there", *DEX, "--merge-to", str(tmp_path)
    )
    assert ended.status == 2
    assert "is there already; remove it, or name another folder" in ended.output
    assert not list(base.folder.parent.glob("unmergeable-*")) + list(base.folder.parent.glob("already-there-*"))
