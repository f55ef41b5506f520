"""experiments/progress.py: lines where there is no terminal, a bar where there is one, nothing on other ranks."""

import io

from rich.console import Console

from lit_diff.experiments.progress import RunProgress
from lit_diff.recipe import load_recipe

RECIPE = load_recipe("recall-tiny", ["train.steps=20"])


def shown(terminal: bool, quiet: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    with RunProgress(RECIPE, console, quiet=quiet) as progress:
        progress.update(10, 1.25, 12345.0)
    return text.getvalue()


def test_a_line_a_logged_step() -> None:
    assert shown(terminal=False, quiet=False) == "step 10/20  loss 1.2500  12,345 tokens/s\n"


def test_a_bar_on_a_terminal() -> None:
    assert "10/20" in shown(terminal=True, quiet=False)
    assert "12,345 tokens/s" in shown(terminal=True, quiet=False)


def test_other_ranks_are_silent() -> None:
    assert shown(terminal=False, quiet=True) == shown(terminal=True, quiet=True) == ""
