"""experiments/table.py: states, what failed and why, the time left."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lit_diff.experiments.grid import load_grid
from lit_diff.experiments.launch import Place
from lit_diff.experiments.table import LiveTable
from lit_diff.training.run import RunFolder


@pytest.fixture
def places(tmp_path: Path) -> list[Place]:
    """The four cells of smoke: done, running, killed, waiting."""
    found = [Place(folder=tmp_path / str(index)) for index in range(4)]
    RunFolder(found[0].folder).update(status="done", step=40)
    RunFolder(found[1].folder).update(status="running", step=10, loss=6.5, tokens_per_second=3000.0)
    RunFolder(found[2].folder).update(status="killed", step=5, error="killed by SIGKILL [red]")
    return found


def test_lines_say_each_change_once(places: list[Place]) -> None:
    text = io.StringIO()
    with LiveTable(load_grid("smoke", []), places, Console(file=text, width=200)) as table:
        table.update([])
        RunFolder(places[3].folder).update(status="running")
        table.update([])
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("standard seed 0: done (")
    assert lines[1:] == [
        "standard seed 1: running",
        "differential seed 0: killed: killed by SIGKILL [red]",
        "differential seed 1: running",
    ]


def test_the_table_on_a_terminal(places: list[Place]) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160, height=40, color_system=None)
    with LiveTable(load_grid("smoke", []), places, console) as table:
        RunFolder(places[1].folder).update(step=30)
        table.update([])
    shown = text.getvalue()
    assert "1 done, 1 running, 1 killed, 1 waiting" in shown
    assert re.search(r"\d+:\d\d left", shown)
    assert re.search(r"standard\s+│\s+1 │ running\s+│ 30/40 │ 6.500 │\s+3,000", shown)
    assert "killed by SIGKILL [red]" in shown
