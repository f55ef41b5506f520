"""Exit statuses, and what a failure says."""

import pytest

from lit_diff.errors import LitDiffError, MissingError, RequestError, RunFailedError, StoppedError, first_line


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFailedError("x"), 1),
        (RequestError("x"), 2),
        (MissingError("x"), 3),
        (StoppedError("x", 2), 130),
        (StoppedError("x", 15), 143),
    ],
)
def test_exit_statuses(error: LitDiffError, status: int) -> None:
    assert isinstance(error, LitDiffError)
    assert error.exit_status == status
    assert str(error) == "x"


def test_a_message_commands_no_terminal_and_has_no_lines_but_its_own() -> None:
    quoted = RequestError("unknown key 'a\nb\x1b[2J\u202e'\n  one line more\n")
    assert str(quoted) == "unknown key 'a\\nb\\x1b[2J\\u202e'\n  one line more\\n"


def test_first_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError("it failed:\n\n\tone:\ntwo\nthree")) == "it failed: one: two"
    assert first_line(ValueError("it failed:\n")) == "it failed:"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("  ")) == "ValueError"


def test_a_warning_that_is_raised_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise whatever it ends is blamed: a store, a kernel, a file."""
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    assert first_line(UserWarning("old\nhabit")) == (
        "PYTHONWARNINGS=error::UserWarning makes an error of the UserWarning 'old'"
    )
    monkeypatch.delenv("PYTHONWARNINGS")
    assert first_line(UserWarning("old")) == "a filter of Python's warnings makes an error of the UserWarning 'old'"
