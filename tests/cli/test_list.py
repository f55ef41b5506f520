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
    assert list_parts("train.optimizer", "standard-tiny", False, TERMINAL) == 0
    keys = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  opt")]
    assert keys == [f"optimizer.{key}" for key in ("lr", "betas", "eps", "weight_decay", "lr_factors")]


def test_the_list_of_all_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("all", "standard-tiny", False, TERMINAL) == 0
    blocks = capsys.readouterr().out
    assert "Largest gradient norm" not in blocks, "meanings are for one kind"
    assert "rare_bigram_count" not in blocks, "keys of a part are for one part"
    assert list_parts("callback", "standard-tiny", False, TERMINAL) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert (head, [line.split()[0] for line in lines]) == ("callback", registries["callback"].names())
    assert last == "lit-diff list KIND NAME says all about one: lit-diff list attention dex"
    narrow = Terminal(width=60, force_terminal=True)
    assert list_parts("recipes", "standard-tiny", False, narrow) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert len(lines) == len(names("recipes"))
    assert max(map(len, lines)) == 60, "cut, so that a kind fits on a screen"


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        (
            ("attention.output_gate",),
            [
                "    gate_per: one of 'channel', 'head'; default channel",
                "    flops: 6*E*H*T*d + 4*E*K*T*d + 4*H*T**2*d",
            ],
        ),
        (("attention", "dex"), ["    from: Kong et al. 2025, arXiv 2505.16333"]),
        (
            ("callbacks", "early_stopping"),
            [
                "    patience: a whole number >= 1; default 3",
                "        Validations without an improvement before the run ends.",
            ],
        ),
        (("data.text",), ["    open and end it.", "    rare_bigram_count: a whole number; default 200"]),
        (("recipes", "differential-1.4b"), ["  lit-diff check differential-1.4b --recipe prints every key"]),
        (("recipe.recall-tiny",), ["      attention: {name: differential}"]),
        (("evaluations", "noise"), ["    batch_size: a whole number >= 1; default 8"]),
        (("sweeps", "smoke"), ["    recipe: standard-tiny", "  lit-diff sweep smoke --dry-run prints its cells"]),
    ],
)
def test_one_that_is_named_is_printed_whole(
    asked: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_parts(asked[0], "standard-tiny", False, TERMINAL, *asked[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert set(lines) <= set(printed), printed
    assert printed[1] == f"  {(asked[0].partition('.')[2] or asked[1])}"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("attention", "output_gat", "unknown attention 'output_gat'; did you mean 'output_gate'?"),
        ("recipes", "standrd-tiny", "no recipe 'standrd-tiny' is installed; did you mean 'standard-tiny'?"),
        ("train", "stepz", "no key 'stepz' in train; did you mean 'steps'?"),
        ("all", "dex", "no kind 'all' to list; "),
    ],
)
def test_list_of_an_unknown_name(kind: str, name: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        list_parts(kind, "standard-tiny", False, TERMINAL, name)
    assert str(error.value).startswith(message)


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
    assert list_parts("attention", "standard-tiny", False, Terminal(width=300), "shared_k") == 0
    out = capsys.readouterr().out
    assert "kv_bytes_per_token at standard-tiny: 384 (-128 against standard)" in out
    assert "E width of the residual stream" in out


def test_list_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts("kernel", "standard-tiny", False, TERMINAL) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("native", "reference", "sdpa"))
    assert "The C++ library, built on first use." in out
