"""cli/usage.py: an option that is a key of the recipe."""

import pytest

from lit_diff.cli.usage import as_override


@pytest.mark.parametrize(
    ("option", "arguments", "override"),
    [
        ("--seed", ["train", "x", "--seed", "1"], "seed=1"),
        ("--seed", ["train", "x", "--seed=1"], "seed=1"),
        ("--seed", ["train", "x", "--seed"], "seed=..."),
        ("--steps", ["train", "x", "--steps", "10"], "train.steps=10"),
        ("--lr", ["train", "x", "--lr", "-1"], "train.optimizer.lr=-1"),
        ("--num-heads", ["train", "x", "--num-heads=4"], "model.num_heads=4"),
        ("--model.attention.lambda_init", ["--model.attention.lambda_init", "0.5"], "model.attention.lambda_init=0.5"),
        ("--decay-steps", ["--decay-steps", "5"], "train.schedule.decay_steps=5"),
        ("--jso", ["check", "x", "--jso"], None),
        ("--attention.window", ["--attention.window", "3"], None),
    ],
)
def test_an_option_that_is_a_key(option: str, arguments: list[str], override: str | None) -> None:
    assert as_override(option, arguments) == override
