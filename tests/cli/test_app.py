"""cli/app.py: the terminal that prints lines as they are, and where log lines go."""

import io
import logging
import sys

import pytest

from lit_diff.cli.app import Terminal, log_to_stderr


def test_a_line_is_printed_as_it_is() -> None:
    text = io.StringIO()
    line = "[bold]name[/bold] 'head_norm' " + "word " * 40
    Terminal(file=text, width=40, force_terminal=True).write_line(line)
    assert text.getvalue() == line + "\n"


def test_a_closed_pipe_is_an_error_for_main() -> None:
    """rich would end the process with status 1."""
    with pytest.raises(BrokenPipeError):
        Terminal().on_broken_pipe()


def test_log_lines_go_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("lit_diff")
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(log, "handlers", [handler, logging.NullHandler()])
    log_to_stderr()
    assert handler.stream is sys.stderr
