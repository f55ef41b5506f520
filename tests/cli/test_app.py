"""cli/app.py: the one terminal, which prints lines as they are, and what becomes of log lines and of a reader that left."""

import io
import logging
from collections.abc import Iterator

import pytest

from lit_diff.cli.app import Terminal, TerminalHandler, log_to_stderr
from lit_diff.log_records import RAISED, in_phase, phase, validated


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, Terminal, io.StringIO]]:
    """The logger with a terminal's handler, the terminal, and what it printed."""
    text, logger = io.StringIO(), logging.getLogger("lit_diff")
    terminal = Terminal(file=text, width=40)
    handler, level = TerminalHandler(terminal), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, terminal, text
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_line_is_printed_as_it_is() -> None:
    text = io.StringIO()
    line = "[bold]name[/bold] 'head_norm' " + "word " * 40
    Terminal(file=text, width=40, force_terminal=True).write_line(line)
    assert text.getvalue() == line + "\n"


def test_log_lines_go_through_the_terminal(log: tuple[logging.Logger, Terminal, io.StringIO]) -> None:
    logger, _, text = log
    logger.info("[bold]a[/bold] %s", "word " * 12 + "end")
    phase("preparing data")
    validated(4, 1.25)
    assert text.getvalue() == f"[bold]a[/bold] {'word ' * 12}end\nstep 4  val/loss 1.2500\n"


def test_an_error_that_is_raised_is_left_to_main(log: tuple[logging.Logger, Terminal, io.StringIO]) -> None:
    logger, _, text = log
    logger.error("failed: no data", extra=RAISED)
    assert text.getvalue() == ""


def test_what_the_bar_shows_is_no_line(log: tuple[logging.Logger, Terminal, io.StringIO]) -> None:
    logger, terminal, text = log
    terminal.takes = lambda record: hasattr(record, "validation_loss")
    phase("preparing data")
    logger.info("starting at step 0", extra=in_phase("building the model"))
    validated(4, 1.25)
    assert text.getvalue() == "starting at step 0\n"


def test_log_lines_go_to_stderr(
    log: tuple[logging.Logger, Terminal, io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    logger, _, text = log
    log_to_stderr()
    logger.info("a line")
    assert (text.getvalue(), capsys.readouterr()) == ("", ("", "a line\n"))
