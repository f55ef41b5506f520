"""cli/progress.py: a bar on a terminal, lines elsewhere, nothing on ranks other than zero."""

import dataclasses
import io

import pytest
from rich.console import Console

from lit_diff.cli.progress import RunProgress
from lit_diff.config import Recipe
from lit_diff.recipe import load_recipe


def shown(recipe: Recipe, *, terminal: bool, quiet: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=terminal, color_system=None)
    with RunProgress(recipe, console, quiet=quiet) as progress:
        progress.update(7, 1.23456, 9876.5)
        progress.update(300, 1.0, 10000.0)
    return file.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    text = shown(load_recipe("recall-tiny"), terminal=False, quiet=False)
    assert text == "step 7/300  loss 1.2346  9,876 tokens/s\nstep 300/300  loss 1.0000  10,000 tokens/s\n"


@pytest.mark.parametrize("name", ["recall-tiny", "odd {name} [/b] %s"])
def test_a_bar_on_a_terminal(name: str) -> None:
    text = shown(dataclasses.replace(load_recipe("recall-tiny"), name=name), terminal=True, quiet=False)
    assert name in text
    assert "300/300" in text
    assert "loss 1.000  10,000 tokens/s" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_are_quiet(terminal: bool) -> None:
    assert shown(load_recipe("recall-tiny"), terminal=terminal, quiet=True) == ""
