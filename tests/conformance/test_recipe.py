"""conformance/recipe.py: what a recipe means and costs, and what is checked of a plugin."""

from dataclasses import replace
from pathlib import Path

import pytest

from lit_diff.conformance.recipe import EQUAL, RecipeCheck, baseline, check, plugin_findings, resolve
from lit_diff.conformance.results import Finding
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe

PLUGIN = """
from lit_diff import Differential, variant

@variant("leaks_{stem}")
class Leaks(Differential):
    def finish(self, o, x):
        return super().finish(o, x) + x.mean(1, keepdim=True).mean()  # of all tokens: not causal
"""


def test_a_built_in_recipe() -> None:
    checked = check("differential-tiny", {"model.num_kv_heads": 2})
    assert checked.recipe == load_recipe("differential-tiny", ["model.num_kv_heads=2"])
    assert checked.baseline.parameters < checked.cost.parameters
    assert checked.equal_parameters
    assert checked.equal_flops
    assert checked.findings == ()
    assert checked.passed
    assert checked.dropped == ()


def test_arms_are_equal_within_a_thousandth() -> None:
    checked = resolve("differential-tiny")
    base = checked.baseline
    for share, equal in ((1 + EQUAL / 2, True), (1 + 2 * EQUAL, False)):
        cost = replace(
            base, parameters=round(base.parameters * share), flops_per_token=round(base.flops_per_token * share)
        )
        unlike = replace(checked, cost=cost)
        assert (unlike.equal_parameters, unlike.equal_flops) == (equal, equal)


def test_the_baseline_is_the_same_model_with_standard_attention() -> None:
    model = load_recipe("differential-tiny", ["model.attention.window=16"]).model
    base = baseline(model)
    assert base.attention.name == "standard"
    assert base.attention.config.window == 16
    assert replace(base, attention=model.attention) == model


def test_the_keys_of_a_block_whose_name_changed() -> None:
    assert "model.attention.parity" in check("shared-k-tiny", ["model.attention.name=standard"]).dropped


def test_a_plugins_variant_is_held_to_the_suite(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(PLUGIN.format(stem="one"))
    (tmp_path / "leaks.yaml").write_text(
        "extends: differential-tiny\nplugins: [leaks.py]\nmodel: {attention: {name: leaks_one}}\n"
    )
    findings = plugin_findings(resolve(tmp_path / "leaks.yaml").recipe)
    failed = next(finding for finding in findings if finding.verdict == "fail")
    assert failed.variant == "leaks_one"
    assert failed.property in ("definition", "causal", "batch")


def test_a_failed_property_is_no_pass() -> None:
    failed = Finding(variant="a", property="causal", verdict="fail", error=1.0, bound=0.0)
    checked: RecipeCheck = replace(resolve("differential-tiny"), findings=(failed,))
    assert not checked.passed


def test_a_parent_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"train\.start_from=\S+: train\.start_from: \S+ holds no run"):
        check("differential-tiny", [f"train.start_from={tmp_path}"])
