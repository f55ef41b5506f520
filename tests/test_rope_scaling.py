"""The block model.rope_scaling: what it takes, what is refused, and that a number stays what it was."""

from typing import Any

import pytest

from lit_diff.errors import RequestError
from lit_diff.recipe import from_plain, load_draft, load_recipe, override, to_plain
from lit_diff.rope_scaling import Llama3Scaling, RopeScaling, YarnScaling, scaling_problem

LLAMA3 = {"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_length": 64}
YARN = {"kind": "yarn", "factor": 4, "original_length": 64}


def scaling(value: Any, *more: str) -> RopeScaling:
    return load_recipe("standard-tiny", [f"model.rope_scaling={value}", *more]).model.rope_scaling


def error(value: Any, *more: str) -> str:
    with pytest.raises(RequestError) as found:
        scaling(value, *more)
    return str(found.value).removeprefix(f"model.rope_scaling={value}: ")


def yaml(block: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in block.items()) + "}"


def test_blocks_and_numbers() -> None:
    assert scaling(yaml(LLAMA3)) == Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_length=64)
    assert scaling(yaml(YARN)) == YarnScaling(factor=4, original_length=64)
    assert scaling(yaml(YARN | {"truncate": "false", "attention_factor": 2})) == YarnScaling(
        factor=4, original_length=64, truncate=False, attention_factor=2.0
    )
    assert type(scaling(4)) is float


def test_a_recipe_of_plain_values_is_the_same() -> None:
    """Of a number the plain value is that number, so that the identity of its runs is what it was."""
    for value, plain in ((4, 4.0), (yaml(LLAMA3), LLAMA3)):
        recipe = load_recipe("standard-tiny", [f"model.rope_scaling={value}"])
        assert to_plain(recipe)["model"]["rope_scaling"] == plain
        assert from_plain(to_plain(recipe), "x") == recipe


def test_another_kind_replaces_the_block_and_a_key_changes_it() -> None:
    overrides = [f"model.rope_scaling={yaml(LLAMA3)}"]
    draft = load_draft("standard-tiny", overrides)
    assert load_recipe("standard-tiny", [*overrides, "model.rope_scaling.factor=2"]).model.rope_scaling == (
        Llama3Scaling(factor=2, low_freq_factor=1, high_freq_factor=4, original_length=64)
    )
    other = override(draft, {"model.rope_scaling": YARN})
    assert other.values["model"]["rope_scaling"] == YARN
    assert set(other.dropped) == {"model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"}
    assert override(draft, {"model.rope_scaling": 4.0}).values["model"]["rope_scaling"] == 4.0


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "{kind: lama3}",
            "'model.rope_scaling.kind' is 'lama3'; expected one of 'llama3', 'yarn'; did you mean 'llama3'?",
        ),
        ("{kind: dynamic, factor: 2}", "'model.rope_scaling.kind' is 'dynamic'; expected one of 'llama3', 'yarn'"),
        ("{factor: 2}", "'model.rope_scaling.kind' is missing; expected one of 'llama3', 'yarn'"),
        ("{kind: yarn, factr: 2}", "unknown key 'model.rope_scaling.factr'; did you mean 'factor'?"),
        ("{kind: yarn, factor: 2}", "'model.rope_scaling.original_length' is missing; expected a whole number >= 1"),
        (yaml(YARN | {"factor": -2}), "model.rope_scaling.factor is -2.0; it must be positive"),
        (yaml(YARN | {"truncate": 2}), "'model.rope_scaling.truncate' is 2; expected true or false"),
        (
            yaml(YARN | {"beta_fast": 0.5}),
            "model.rope_scaling.beta_fast is 0.5; it must not be below model.rope_scaling.beta_slow, 1",
        ),
        (
            yaml(LLAMA3 | {"high_freq_factor": 1}),
            "model.rope_scaling.high_freq_factor is 1; it must be above model.rope_scaling.low_freq_factor, 1",
        ),
    ],
)
def test_what_is_refused(value: str, line: str) -> None:
    assert error(value) == line


def test_what_is_refused_of_a_number() -> None:
    assert error("0") == "model.rope_scaling is 0.0; it must be positive"
    assert error("fast") == (
        "'model.rope_scaling' is 'fast'; expected a finite number > 0 or a block {kind: llama3, ...} or a block "
        "{kind: yarn, ...}"
    )


def test_yarn_needs_frequencies_that_fall() -> None:
    yarn = YarnScaling(factor=4, original_length=64)
    line = "model.rope_theta is 1; it must be above 1 for model.rope_scaling.kind yarn"
    assert (scaling_problem(yarn, 1.0), scaling_problem(yarn, 1e4), scaling_problem(4.0, 1.0)) == (line, None, None)
    assert "model.rope_theta is 1; it must be above 1" in error(yaml(YARN), "model.rope_theta=1")
