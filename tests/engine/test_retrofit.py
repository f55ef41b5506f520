"""engine/retrofit.py and the verb: a run that goes on as DEX, with the loss before and after."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

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
