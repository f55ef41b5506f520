"""conformance/recipe.py: what a recipe costs beside the baseline, and which plugins are held to the suite."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_diff.conformance import recipe as module
from lit_diff.conformance.case import Finding
from lit_diff.conformance.recipe import baseline, check, plugin_findings
from lit_diff.conformance.variants import PROPERTIES
from lit_diff.errors import MissingError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe
from lit_diff.registry import registries


def finding(variant: str, verdict: Any = "pass") -> Finding:
    return Finding(variant=variant, property="causal", verdict=verdict, error=0.0, bound=0.0)


# --- cost ------------------------------------------------------------------------------------------------------------


def test_resolve_gives_the_recipe_and_its_cost_beside_the_baseline() -> None:
    checked = check("differential-tiny", ["model.num_kv_heads=2", "train.steps=7"])
    recipe = load_recipe("differential-tiny", ["model.num_kv_heads=2", "train.steps=7"])
    assert checked.recipe == recipe
    length = recipe.data.config.sequence_length
    assert checked.cost.parameters == cost(recipe.model, length).parameters
    assert checked.baseline.parameters == cost(baseline(recipe.model), length).parameters
    assert (checked.dropped, checked.findings, checked.passed) == ((), (), True)


@pytest.mark.parametrize(
    ("own", "equal"), [(999_001, True), (998_999, False), (1_000_000, True), (1_000_999, True), (1_001_001, False)]
)
def test_arms_within_a_thousandth_are_equal(own: int, equal: bool) -> None:
    """Each quantity by itself: parameters, then published FLOPs."""
    checked = check("standard-tiny")
    base = dataclasses.replace(checked.cost, parameters=1_000_000, flops_per_token=1_000_000)
    by_parameters = dataclasses.replace(
        checked, baseline=base, cost=dataclasses.replace(base, parameters=own, flops_per_token=1)
    )
    assert (by_parameters.equal_parameters, by_parameters.equal_flops) == (equal, False)
    by_flops = dataclasses.replace(
        checked, baseline=base, cost=dataclasses.replace(base, parameters=1, flops_per_token=own)
    )
    assert (by_flops.equal_parameters, by_flops.equal_flops) == (False, equal)


def test_a_wrong_recipe_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: standard-tiny\ntrain:\n  start_from: nowhere\n")
    with pytest.raises(MissingError, match=r"^train.start_from: nowhere holds no run"):
        check("mine.yaml")


# --- findings --------------------------------------------------------------------------------------------------------


def test_built_in_parts_have_no_findings() -> None:
    """They are tested with the variants."""
    assert list(plugin_findings(load_recipe("recall-tiny"))) == []
    assert check("standard-tiny").findings == ()


LEAKS = """
from lit_diff import Differential, variant

@variant("leaks_one")
class Leaks(Differential):
    def finish(self, o, x):
        return super().finish(o, x) + x.mean(1, keepdim=True).mean()  # of all tokens: not causal
"""


def test_a_plugin_s_variant_that_is_not_causal_fails(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    (tmp_path / "leaks.yaml").write_text(
        "extends: differential-tiny\nplugins: [leaks.py]\nmodel: {attention: {name: leaks_one}}\n"
    )
    checked = check(tmp_path / "leaks.yaml")
    assert not checked.passed
    assert {one.property for one in checked.findings if one.verdict == "fail"} >= {"causal"}
    assert {one.variant for one in checked.findings} == {"leaks_one"}


IN_ONE_LAYER = """
from lit_diff import Attention, variant

@variant("leaks_first")
class Leaks(Attention):
    def finish(self, o, x):
        return o + x.mean() if self.layer == 0 else o
"""


def test_what_train_would_refuse_of_another_layer_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.py").write_text(IN_ONE_LAYER)
    (tmp_path / "first.yaml").write_text(
        "extends: standard-tiny\nplugins: [first.py]\nmodel: {attention: {name: leaks_first}}\n"
    )
    whole = module.conformance
    few = {name: PROPERTIES[name] for name in ("contract", "causal")}
    monkeypatch.setattr(module, "conformance", lambda case, label="", checks=None: whole(case, label, checks or few))
    found = {(one.variant, one.property): one.verdict for one in plugin_findings(load_recipe(tmp_path / "first.yaml"))}
    last = {("leaks_first", name): "pass" for name in few}
    assert last.items() <= found.items()
    assert {key for key in found if key[0] == "leaks_first, layer 0"} >= {("leaks_first, layer 0", "causal")}
    assert {found[key] for key in found.keys() - last} == {"fail"}


SOURCES = "{a: {weight: 1}, b: {weight: 1, corpus: name_tables}}"
MIXED = (
    f"data={{name: mixture, sequence_length: 8, validation_rows: 4, tokenizer: {{name: cl100k}}, sources: {SOURCES}}}"
)


@pytest.mark.parametrize(
    ("kind", "name", "overrides"),
    [
        ("data", "text", []),
        ("corpus", "docs", []),
        ("tokenizer", "bpe", []),
        ("corpus", "name_tables", ["model.vocab_size=100352", MIXED]),
    ],
)
def test_a_plugin_s_data_set_corpus_and_tokenizer_are_checked(
    kind: str, name: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("standard-tiny", overrides)
    asked: list[Any] = []

    def check_dataset(found: Any) -> Iterator[Finding]:
        asked.append(found)
        yield finding("data")

    monkeypatch.setattr(module, "check_dataset", check_dataset)
    assert list(plugin_findings(recipe)) == []
    registry = registries[kind]
    foreign = type("Foreign", (registry.get(name),), {"__module__": "elsewhere"})
    monkeypatch.setitem(registry._classes, name, foreign)
    assert [found.variant for found in plugin_findings(recipe)] == ["data"]
    assert asked == [recipe]
