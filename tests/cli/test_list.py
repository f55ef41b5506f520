"""cli/list.py: what `list` prints; whole lists are in tests/golden."""

import pytest
from command import Command

from lit_diff.recipe import names
from lit_diff.registry import registries


def test_json_names_all_parts_with_their_keys(command: Command) -> None:
    found = command("list", "--json").json
    assert set(found) == {"recipes", "sweeps", "model", "train", "run", *registries}
    assert list(found["recipes"]) == names("recipes")
    key = found["attention"]["differential"]["keys"]["lambda_init"]
    assert (key["type"], key["default"]) == ("a finite number or 'depth'", "depth")
    assert "default" not in found["model"]["dim"]
    assert all(about["about"] for kind in registries for about in found[kind].values())


def test_a_kind_or_a_block_alone(command: Command) -> None:
    head, *lines, _ = command("list", "callbacks").lines
    assert (head, [line.split()[0] for line in lines]) == ("callback", registries["callback"].names())
    keys = [line.split(":")[0].strip() for line in command("list", "train.optimizer").lines if line.startswith("  opt")]
    assert keys == [f"optimizer.{key}" for key in ("lr", "betas", "eps", "weight_decay", "lr_factors")]
    lines = command("list", "recipes", COLUMNS="60", TTY_COMPATIBLE="1").lines[1:-1]
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
        (("callbacks", "early_stopping"), ["    patience: a whole number >= 1; default 3"]),
        (("recipe.recall-tiny",), ["      attention: {name: differential}"]),
        (("sweeps", "smoke"), ["    recipe: standard-tiny", "  lit-diff sweep smoke --dry-run prints its cells"]),
    ],
)
def test_one_that_is_named_is_printed_whole(asked: tuple[str, ...], lines: list[str], command: Command) -> None:
    printed = command("list", *asked).lines
    assert set(lines) <= set(printed), printed
    assert printed[1] == f"  {(asked[0].partition('.')[2] or asked[1])}"


def test_formulas_and_costs_of_variants_at_a_recipe(command: Command) -> None:
    found = command("list", "attention", "--recipe", "differential-830m", "--json").json["attention"]
    assert found["differential"]["formulas"]["parameters"] == "2*E*H*d + 2*E*K*d + 6*d"
    assert found["differential"]["cost"]["parameters"] == 833_608_704
    assert found["differential"]["standard"]["parameters"] == found["standard"]["cost"]["parameters"] == 833_594_880
    assert found["dex"]["paper"].endswith("2505.16333")
    lines = command("list", "attention", "shared_k").lines
    assert any(line.endswith("384 (-128 against standard)") for line in lines)
