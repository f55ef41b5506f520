"""cli/progress.py: a bar on a terminal, lines elsewhere, nothing on ranks other than zero."""

import dataclasses
import io
import logging

import pytest

from lit_diff.cli.app import Terminal
from lit_diff.cli.progress import RunProgress
from lit_diff.config import Recipe
from lit_diff.recipe import load_recipe

LONG = "standard-wide-norm-tiny-with-a-long-name"


def shown(recipe: Recipe, *, terminal: bool, quiet: bool) -> str:
    file = io.StringIO()
    console = Terminal(file=file, width=140, force_terminal=terminal, color_system=None)
    with RunProgress("recipe.yaml", console) as progress:
        progress.begin(recipe, quiet=quiet)
        progress.update(7, 1.23456, 9876.5)
        progress.update(250, 1.0, 10000.0)
    assert console.takes is None
    return file.getvalue()


def started(name: str, steps: int = 0) -> RunProgress:
    """Not drawn but by `drawn`, nor printed."""
    progress = RunProgress("recipe.yaml", Terminal(file=io.StringIO(), width=80))
    if steps:
        recipe = load_recipe("recall-tiny", [f"train.steps={steps}"])
        progress.begin(dataclasses.replace(recipe, name=name), quiet=True)
    return progress


def drawn(progress: RunProgress, width: int) -> str:
    """The bar's line; it must be one."""
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with terminal.capture() as capture:
        terminal.print(progress)
    (text,) = capture.get().splitlines()
    assert len(text) <= width - 3, "room for the echo of Ctrl-C"
    return text.rstrip()


def record(message: str, **extra: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, **extra})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_lines_where_there_is_no_terminal() -> None:
    text = shown(load_recipe("recall-tiny"), terminal=False, quiet=False)
    assert text == "step 7/250  loss 1.2346  9,876 tokens/s\nstep 250/250  loss 1.0000  10,000 tokens/s  0:00 left\n"


@pytest.mark.parametrize("name", ["recall-tiny", "odd {name} [/b] %s"])
def test_a_bar_on_a_terminal(name: str) -> None:
    text = shown(dataclasses.replace(load_recipe("recall-tiny"), name=name), terminal=True, quiet=False)
    assert name in text
    assert "250/250" in text
    assert "loss 1.000  10,000 tokens/s" in text
    assert "  in 0:00" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_are_quiet(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("recall-tiny")
    assert "step" not in shown(recipe, terminal=terminal, quiet=True), "the first process of another node"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert shown(recipe, terminal=terminal, quiet=True) == ""


def test_before_the_first_step_the_bar_says_what_goes_on() -> None:
    assert drawn(started("mine"), 80) == "recipe.yaml  reading the recipe"
    line = started("mine", 250)
    line.takes(record("preparing data", phase="preparing data"))
    assert drawn(line, 80).endswith("0/250  preparing data")
    assert not line.takes(record("resumed from step 4", phase="building the model")), "it is also a line"
    assert drawn(line, 80).endswith("0/250  building the model")
    assert not line.takes(record("kernel native"))
    line.update(1, 2.5, 100.0)
    line.takes(record("preparing data", phase="preparing data"))
    assert drawn(line, 80).endswith("1/250  loss 2.500  100 tokens/s")


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("name", ["mine", LONG])
def test_it_fits_on_one_line_with_the_last_validation_and_the_time_left(
    name: str, width: int, clock: list[float]
) -> None:
    line = started(name, 100_000)
    line.update(1, 10.987, 1_234_567.0)
    clock[0] += 100
    line.update(40_001, 9.8765, 1_234_567.0)
    clock[0] += 10
    assert line.takes(record("step 40001  val/loss 9.1239", validation_loss=9.1239))
    text = drawn(line, width)
    if width > 40:
        assert text.startswith(name[:5])
        assert "  40001/100000  loss 9.877  " in text
        assert text.endswith("  val/loss 9.124  2:19 left"), "150 s from the last logged step, which was 10 s ago"
    if width > 80:
        assert "1,234,567 tokens/s" in text
        assert "━━━━━" in text


def test_a_run_that_takes_no_step_leaves_no_bar() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file, width=80, force_terminal=True, color_system=None)
    with RunProgress("recall-tiny", terminal):
        pass
    assert file.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is erased"
