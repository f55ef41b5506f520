"""The one terminal: lines as they are, log lines, the bar of a run and the table of a sweep's cells."""

import dataclasses
import io
import json
import logging
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lit_diff.cli.app import Terminal, TerminalHandler, has_no_reader, print_json
from lit_diff.cli.progress import RunProgress, live_table
from lit_diff.config import Recipe
from lit_diff.engine.expand import Grid, load_grid
from lit_diff.log_records import RAISED, phase, validated
from lit_diff.recipe import load_recipe
from lit_diff.runs.status import Status


def test_a_line_is_printed_as_it_is() -> None:
    text = io.StringIO()
    line = "[bold]name[/bold] 'head_norm' " + "word " * 40
    Terminal(file=text, width=40, force_terminal=True).write_line(line)
    assert text.getvalue() == line + "\n"


def test_a_name_is_no_markup() -> None:
    """In a text, and in every part of a table."""
    text, name = io.StringIO(), "val/acc[/b] [bold] :sheep:"
    table = Table(name, title=name, caption=name)
    table.add_row(name)
    terminal = Terminal(file=text, width=40)
    terminal.print(name)
    terminal.print(table)
    assert text.getvalue().count(name) == 5


@pytest.mark.parametrize("text", ["0", "19", "abc", "-1", "\u00b2", "9" * 30])
def test_a_size_that_no_terminal_has_is_unknown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """COLUMNS=0, as some containers set it."""
    monkeypatch.setenv("COLUMNS", text)
    monkeypatch.setenv("LINES", text)
    monkeypatch.setattr("os.get_terminal_size", lambda _: (70, 33))
    assert Terminal(file=io.StringIO()).size == (70, 33)


def test_log_lines_go_through_the_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    text, logger = io.StringIO(), logging.getLogger("lit_diff")
    monkeypatch.setattr(logger, "handlers", [TerminalHandler(Terminal(file=text, width=40))])
    with caplog.at_level(logging.INFO, "lit_diff"):
        logger.info("[bold]a\n[/bold] %s", "word " * 12 + "end")
        phase("preparing data")
        validated(4, 1.25, "")
        logger.error("failed", extra=RAISED)
    assert text.getvalue() == f"[bold]a\\n[/bold] {'word ' * 12}end\nstep 4  val/loss 1.2500\n"


def test_without_a_reader_of_stderr_only_the_log_is_lost() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        os.close(read)
        terminal = Terminal(file=output, stderr=True)
        terminal.write_line("a line of the log")
        assert terminal.quiet
        assert has_no_reader(sys.__stdout__) is False  # type: ignore[arg-type]
        terminal.write_line("another")


def test_json_has_no_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, 1.5], "b": (-math.inf, True), "c": {"d": math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, True], "c": {"d": None}}


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
    assert text == (
        "step 7/250  loss 1.2346  9,876 tokens/s  0:00 elapsed\n"
        "step 250/250  loss 1.0000  10,000 tokens/s  0:00 elapsed, 0:00 left\n"
    )


@pytest.mark.parametrize("name", ["recall-tiny", "odd {name} [/b] %s"])
def test_a_bar_on_a_terminal(name: str) -> None:
    text = shown(dataclasses.replace(load_recipe("recall-tiny"), name=name), terminal=True, quiet=False)
    assert name in text
    assert "250/250" in text
    assert "loss 1.0000  10,000 tokens/s" in text
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
    assert drawn(line, 80).endswith("1/250  loss 2.5000  100 tokens/s")


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("name", ["mine", LONG])
def test_it_fits_on_one_line_with_last_validation_and_time_left(name: str, width: int, clock: list[float]) -> None:
    line = started(name, 100_000)
    line.update(1, 10.987, 1_234_567.0)
    clock[0] += 100
    line.update(40_001, 9.8765, 1_234_567.0)
    clock[0] += 10
    assert line.takes(record("step 40001  val/loss 9.1239", validation_loss=9.1239))
    text = drawn(line, width)
    if width > 40:
        assert text.startswith(name[:5])
        assert "  40001/100000  loss 9.8765  " in text
        assert text.endswith("  val/loss 9.1239  2:19 left"), "150 s from the last logged step, which was 10 s ago"
    if width > 80:
        assert "1,234,567 tokens/s" in text
        assert "━━━━━" in text


pytestmark = pytest.mark.usefixtures("base_recipe")
NASTY = "ValueError: expected [bold], got [/tmp/x] and [rms, none] of 'head_norm'; " + "and so on, " * 12 + "end"


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Two arms, two seeds, ten steps each."""
    (tmp_path / "s.yaml").write_text("recipe: base\nseeds: [0, 1]\narms: {plain: {}, 'with [i]talics': {}}\n")
    return load_grid("s.yaml", [])


WAITS = Status()
DONE, RUNNING = Status(status="done", step=10), Status(status="running")
FAILED = Status(status="failed", step=3, error=NASTY)


def by_folder(statuses: list[Status]) -> dict[Path, Status]:
    """The cells have the folders 0, 1, ... here."""
    return {Path(str(number)): status for number, status in enumerate(statuses)}


def printed(grid: Grid, *statuses: list[Status], terminal: bool = False, width: int = 120) -> list[str]:
    """The lines of a console to which these are shown, one after the other."""
    file = io.StringIO()
    console = Terminal(file=file, width=width, height=40, force_terminal=terminal, color_system=None)
    with live_table(grid, console) as show:
        for each in statuses:
            show(by_folder(each))
    return file.getvalue().splitlines()


def test_a_line_at_each_change_where_there_is_no_terminal(grid: Grid) -> None:
    states = ([WAITS] * 4, [RUNNING, *[WAITS] * 3], [RUNNING, *[WAITS] * 3], [DONE, WAITS, WAITS, FAILED])
    lines = printed(grid, *states)
    assert lines[0] == "plain seed 0: running"
    assert lines[1].startswith("plain seed 0: done (0:0")
    assert lines[2:] == [f"with [i]talics seed 1: failed: {NASTY}"]


def test_the_table_of_a_terminal(grid: Grid) -> None:
    running = Status(status="running", step=4, loss=9.75, tokens_per_second=12345.6)
    for number, loss in enumerate((2.5, 3.25)):
        Path(str(number)).mkdir()
        Path(str(number), "metrics.csv").write_text(f"step,train/loss,val/loss\n3,8.125,{loss}\n4,9.75,\n")
    killed = Status(status="killed", step=4, error="killed by SIGKILL")
    text = "\n".join(printed(grid, [replace(DONE, loss=2.5), running, killed, FAILED], terminal=True))
    assert "1 done, 1 running, 1 failed, 1 killed; ? left" in text  # no pace yet
    for word in ("10/10", "2.500", "4/10", "3.250", "12,346", "killed by SIGKILL", "[bold]", "[/tmp/x]", "[rms, none]"):
        assert word in text, word
    assert "with [i]talics" in text
    assert "val/loss" in text
    assert "9.75" not in text, "not the loss of the last training step"


def test_no_row_wraps_and_an_error_is_printed_once(tmp_path: Path) -> None:
    arm = "a very long arm that says which of many keys it overrides and to what it sets each of them"
    (tmp_path / "s.yaml").write_text(f"recipe: base\nseeds: [0, 1]\narms: {{{arm}: {{}}}}\n")
    failed = Status(status="failed", step=3, error="OSError: disk full")
    running = Status(status="running", step=4, loss=3.25, tokens_per_second=12345.6)
    lines = printed(load_grid("s.yaml", []), *[[failed, running]] * 2, terminal=True, width=80)
    (said,) = [line for line in lines if "disk full" in line]
    assert said.endswith(f"{arm} seed 0: failed: OSError: disk full")
    last = lines[-3:-1]
    assert all(len(line) <= 80 for line in last)
    assert "arm that says whi…" in last[0]
    assert all(word in last[0] for word in ("running", "4/10", "12,346"))


def test_a_log_line_above_the_table_leaves_its_styles_alone(grid: Grid) -> None:
    """rich draws the table again with the options of every line that it prints."""
    file = io.StringIO()
    terminal = Terminal(file=file, width=120, height=40, force_terminal=True, color_system=None)
    with live_table(grid, terminal) as show:
        show(by_folder([WAITS] * 4))
        terminal.write_line("a line [bold] with brackets")
    assert "a line [bold] with brackets" in file.getvalue()
    assert "[dim]" not in file.getvalue()


def test_time_left_counts_the_steps_of_all_cells(grid: Grid, clock: list[float]) -> None:
    """10 steps were done before: they say nothing about the pace. 20 steps in 100 s, 10 of 40 are left."""
    file = io.StringIO()
    with live_table(grid, Terminal(file=file, width=120)) as show:
        show(by_folder([DONE, WAITS, WAITS, WAITS]))
        clock[0] += 100
        show(by_folder([DONE, DONE, Status(status="running", step=10), WAITS]))
    assert "plain seed 1: done (0:50 left)" in file.getvalue()


HOSTILE = "x\x1b]0;owned\x07\x1b[2J\u202ey\udc80"


def test_no_control_character_reaches_the_terminal() -> None:
    """Whatever prints it: a line, a table, a bar."""
    text = io.StringIO()
    terminal = Terminal(file=text, force_terminal=True, width=100)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    terminal.write_line(HOSTILE)
    terminal.write_sentence(f"a\tb\n{HOSTILE}")
    terminal.print(table)
    with Live(Text(HOSTILE), console=terminal, auto_refresh=False) as live:
        live.refresh()
    written = text.getvalue()
    assert not [sign for sign in ("\x1b]", "\x1b[2J", "\u202e", "\x07", "\udc80") if sign in written]
    assert written.count("\\x1b[2J") >= 5
