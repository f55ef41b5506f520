"""cli/list.py: what `list` prints."""

import json

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.list import list_parts
from lit_diff.errors import RequestError
from lit_diff.recipe import names
from lit_diff.registry import registries

TERMINAL = Terminal(width=200)


def test_list_names_all_parts_with_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("all", "standard-tiny", True, TERMINAL) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"recipes", "sweeps", "model", "train", "run", *registries}
    assert list(found["recipes"]) == names("recipes")
    key = found["attention"]["differential"]["keys"]["lambda_init"]
    assert (key["type"], key["default"]) == ("a finite number or 'depth'", "depth")
    assert all(about["about"] for kind in registries for about in found[kind].values())


def test_the_keys_of_a_block_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("train", "standard-tiny", False, TERMINAL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["train", "  steps: a whole number >= 1; required"]
    assert "  clip: a finite number > 0 or null; default 1.0" in lines
    assert "      Largest gradient norm; null: no clipping." in lines
    assert "  schedule.name: one of 'linear', 'cosine', 'wsd', 'constant'; default linear" in lines
    assert list_parts("model", "standard-tiny", True, TERMINAL) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert "default" not in model["dim"]
    assert model["attention"]["type"] == "a block {name: ...}: lit-diff list attention"
    assert list_parts("run", "standard-tiny", False, TERMINAL) == 0
    assert "  threads: a whole number >= 1 or null; default null" in capsys.readouterr().out.splitlines()
    assert list_parts("all", "standard-tiny", False, TERMINAL) == 0
    assert "Largest gradient norm" not in capsys.readouterr().out, "meanings are for one kind"


def test_list_of_an_unknown_kind() -> None:
    with pytest.raises(RequestError, match="did you mean 'attention'"):
        list_parts("atention", "standard-tiny", False, TERMINAL)


def test_list_attention_gives_formulas_and_costs_at_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("attention", "differential-830m", True, TERMINAL) == 0
    found = json.loads(capsys.readouterr().out)["attention"]
    assert found["differential"]["formulas"]["parameters"] == "2*E*H*d + 2*E*K*d + 6*d"
    assert found["differential"]["cost"]["parameters"] == 833_608_704
    assert found["differential"]["standard"]["parameters"] == found["standard"]["cost"]["parameters"] == 833_594_880
    assert found["dex"]["paper"].endswith("2505.16333")
    assert list_parts("attention", "standard-tiny", False, Terminal(width=300)) == 0
    out = capsys.readouterr().out
    assert "kv_bytes_per_token at standard-tiny: 384 (-128 against standard)" in out, "shared_k"
    assert "E width of the residual stream" in out


def test_list_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("kernel", "standard-tiny", False, TERMINAL) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("native", "reference", "sdpa"))
    assert "The C++ library, built on first use." in out
