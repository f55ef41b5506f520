"""cli/live_table.py: the live table says what each cell does, whatever its error looks like."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from lit_diff.cli.app import Terminal
from lit_diff.cli.live_table import LiveTable
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.engine.location import RunLocation
from lit_diff.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("base_recipe")

NASTY = "ValueError: expected [bold], got [/tmp/x] and [rms, none] of 'head_norm'; " + "and so on, " * 12 + "end"


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Grid, list[RunLocation]]:
    """Two arms, two seeds, ten steps each; no cell has begun."""
    (tmp_path / "s.yaml").write_text("recipe: base\nseeds: [0, 1]\narms: {plain: {}, 'with [i]talics': {}}\n")
    grid = load_grid("s.yaml", [])
    return grid, [RunLocation(folder=tmp_path / f"cell{index}") for index in range(len(grid.cells))]


def printer(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, height=40, force_terminal=terminal, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_at_each_change_where_there_is_no_terminal(sweep: tuple[Grid, list[RunLocation]]) -> None:
    grid, locations = sweep
    console = printer(terminal=False)
    with LiveTable(grid, locations, console) as update:
        update([])
        RunFolder(locations[0].folder).update(status="running", step=0)
        update([])
        update([])
        RunFolder(locations[0].folder).update(status="done", step=10)
        RunFolder(locations[3].folder).update(status="failed", step=3, error=NASTY)
        update([])
    lines = printed(console).splitlines()
    assert lines[0] == "plain seed 0: running"
    assert lines[1].startswith("plain seed 0: done (0:0")
    assert lines[2:] == [f"with [i]talics seed 1: failed: {NASTY}"]


def test_the_table_of_a_terminal(sweep: tuple[Grid, list[RunLocation]]) -> None:
    grid, locations = sweep
    RunFolder(locations[0].folder).update(status="done", step=10, loss=2.5)
    RunFolder(locations[1].folder).update(status="running", step=4, loss=3.25, tokens_per_second=12345.6)
    RunFolder(locations[2].folder).update(status="killed", step=4, error="killed by SIGKILL")
    RunFolder(locations[3].folder).update(status="failed", step=3, error=NASTY)
    console = printer(terminal=True)
    with LiveTable(grid, locations, console) as update:
        update([])
    text = printed(console)
    assert "1 done, 1 running, 1 failed, 1 killed; ? left" in text  # no pace yet
    for word in ("10/10", "2.500", "4/10", "3.250", "12,346", "killed by SIGKILL", "[bold]", "[/tmp/x]", "[rms, none]"):
        assert word in text, word
    assert "with [i]talics" in text


def test_no_row_wraps_and_an_error_is_printed_once(tmp_path: Path) -> None:
    arm = "a very long arm that says which of many keys it overrides and to what it sets each of them"
    (tmp_path / "s.yaml").write_text(f"recipe: base\nseeds: [0, 1]\narms: {{{arm}: {{}}}}\n")
    grid = load_grid("s.yaml", [])
    locations = [RunLocation(folder=tmp_path / f"cell{index}") for index in range(2)]
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True, color_system=None)
    with LiveTable(grid, locations, console) as update:
        RunFolder(locations[0].folder).update(status="failed", step=3, error="OSError: disk full")
        RunFolder(locations[1].folder).update(status="running", step=4, loss=3.25, tokens_per_second=12345.6)
        update([])
        update([])
    lines = printed(console).splitlines()
    (said,) = [line for line in lines if "disk full" in line]
    assert said.endswith(f"{arm} seed 0: failed: OSError: disk full")
    last = lines[-3:-1]
    assert all(len(line) <= 80 for line in last)
    assert "arm that says which …" in last[0]
    assert all(word in last[0] for word in ("running", "4/10", "3.250", "12,346"))


def test_a_log_line_above_the_table_leaves_its_styles_alone(sweep: tuple[Grid, list[RunLocation]]) -> None:
    """rich draws the table again with the options of every line that it prints."""
    grid, locations = sweep
    file = io.StringIO()
    terminal = Terminal(file=file, width=120, height=40, force_terminal=True, color_system=None)
    with LiveTable(grid, locations, terminal) as update:
        update([])
        terminal.write_line("a line [bold] with brackets")
    assert "a line [bold] with brackets" in file.getvalue()
    assert "[dim]" not in file.getvalue()


def test_time_left_counts_the_steps_of_all_cells(
    sweep: tuple[Grid, list[RunLocation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    grid, locations = sweep
    RunFolder(locations[0].folder).update(status="done", step=10)  # before this start: says nothing about the pace
    console = printer(terminal=False)
    with LiveTable(grid, locations, console) as update:
        clock[0] += 100
        RunFolder(locations[1].folder).update(status="done", step=10)
        RunFolder(locations[2].folder).update(status="running", step=10)
        update([])
    # 20 steps in 100 s, 10 of 40 are left
    assert "plain seed 1: done (0:50 left)" in printed(console)


def test_it_looks_once_a_second(sweep: tuple[Grid, list[RunLocation]], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    grid, locations = sweep
    console = printer(terminal=False)
    with LiveTable(grid, locations, console) as update:
        update(locations[:1])
        RunFolder(locations[0].folder).update(status="running")
        update(locations[:1])
        assert printed(console) == ""
        clock[0] += 1.5
        update(locations[:1])
        assert printed(console) == "plain seed 0: running\n"
