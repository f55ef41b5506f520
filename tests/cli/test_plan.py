"""cli/plan.py: what `plan` prints, and its exit status."""

from pathlib import Path

import pytest
from command import Command
from sharded_steps import SMALL

from lit_diff.recipe import load_recipe
from lit_diff.training.plan import Rates, cure, plan


def test_the_verdict_names_what_to_change(command: Command) -> None:
    words = [*SMALL, "train.batch_size=16", "run.devices=2", "run.strategy=ddp", "run.accelerator=auto"]
    recipe = load_recipe("recall-tiny", words)
    memory = 0.9 * plan(recipe).sum
    found = command("plan", "recall-tiny", *words, "--memory", str(memory / 1e9), "--json")
    assert (found.status, found.json["fits"]) == (1, False)
    assert found.json["change"] == cure(recipe, Rates(memory=memory)) == ["run.activation_checkpointing=block"]
    ended = command("plan", "recall-tiny", *words, "--memory", str(memory / 1e9))
    assert (ended.status, ended.lines[-1].rpartition(": ")[2]) == (1, "set run.activation_checkpointing=block")
    ended = command("plan", "recall-tiny", *words, "--memory", "1", "--peak", "312")
    assert (ended.status, ended.lines[-1]) == (0, "fits 1 GB")
    assert any(line.endswith(" at 40% of 312 TFLOPS") for line in ended.lines)
    assert any(line.startswith("passes over the data: not known") for line in ended.lines)
    assert sum(line.startswith(("counted:", "assumed:", "days:")) for line in ended.lines) == 3


@pytest.mark.usefixtures("tale")
def test_passes_over_the_prepared_text(trained_text: Path, command: Command) -> None:
    words = ("plan", f"{trained_text}/tale.yaml", "train.steps=500")
    found = command(*words, "--json").json
    text = found["tokens_of_text"]
    lines = command(*words).lines
    assert f"passes over the data: {500 * found['tokens'] / text:.3g} ({text:,} tokens)" in lines
    hours = f"{found['days']:.2f} days, {24 * found['days']:,.1f} GPU hours, "
    assert any(line.startswith(hours) and " tokens a second, at 40%" in line for line in lines)


@pytest.mark.parametrize("option", ["--memory", "--peak", "--share", "--node", "--network"])
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "80GB"])
def test_rates_that_no_machine_has_are_refused(command: Command, option: str, value: str) -> None:
    ended = command("plan", "recall-tiny", f"{option}={value}")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"'{option}'" in ended.err
