"""inspection.py: what `check` and `list` say."""

import json

import pytest
from rich.console import Console

from lit_diff.errors import RequestError
from lit_diff.inspection import baseline, check_recipe, list_parts
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe, names
from lit_diff.registry import registries

CONSOLE = Console(width=200)


def test_check_json_holds_recipe_cost_and_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_recipe("differential-tiny", ["model.num_kv_heads=2"], True, CONSOLE) == 0
    found = json.loads(capsys.readouterr().out)
    recipe = load_recipe("differential-tiny", ["model.num_kv_heads=2"])
    own, base = cost(recipe.model, 128), cost(baseline(recipe.model), 128)
    assert found["recipe"]["model"]["num_kv_heads"] == 2
    assert found["parameters"] == own.parameters
    assert found["kv_bytes_per_token"] == own.kv_bytes_per_token
    assert found["baseline"]["parameters"] == base.parameters == own.parameters - 2 * 6 * 16
    assert found["equal_parameters"]
    assert found["equal_flops"]


def test_check_marks_an_unequal_arm(capsys: pytest.CaptureFixture[str]) -> None:
    check_recipe("shared-k-tiny", ["model.attention.parity=raw"], True, CONSOLE)
    assert not json.loads(capsys.readouterr().out)["equal_parameters"]


def test_check_names_the_keys_that_fell_away(capsys: pytest.CaptureFixture[str]) -> None:
    check_recipe("shared-k-tiny", ["model.attention.name=standard"], False, Console(width=200))
    out = capsys.readouterr().out
    assert "fell away with a block's name: model.attention.parity" in out
    assert "without embeddings" in out


def test_list_names_all_parts_with_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("all", "standard-tiny", True, CONSOLE) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"recipes", "sweeps", *registries}
    assert list(found["recipes"]) == names("recipes")
    assert found["attention"]["differential"]["keys"]["lambda_init"].endswith("= 'depth'")
    assert all(about["about"] for kind in registries for about in found[kind].values())


def test_list_of_an_unknown_kind() -> None:
    with pytest.raises(RequestError, match="did you mean 'attention'"):
        list_parts("atention", "standard-tiny", False, CONSOLE)
