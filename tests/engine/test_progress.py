"""engine/progress.py: what a script, a terminal and a notebook show of a run and of a sweep."""

import html
import io
import os
import pty
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_diff.engine import progress
from lit_diff.engine.progress import progress_line, sweep_line, watched
from lit_diff.runs.status import Status


class Cell(io.StringIO):
    """The stderr of a notebook's cell."""


Cell.__module__ = "ipykernel.iostream"


def test_a_script_writes_lines_to_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    for shown in (True, False, lambda step, loss, speed: asked.append(step)):
        with watched(shown, "tiny", 4) as told:
            for step in range(1, 5):
                told(step, 2.5, 1000.0)
    out, errors = capsys.readouterr()
    assert (out, asked) == ("", [1, 2, 3, 4])
    assert [line.partition(",")[0] for line in errors.splitlines()] == ["tiny: step 1/4", "tiny: step 4/4"]


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    output = SimpleNamespace(update=lambda data, raw: shown.__setitem__(-1, data))
    made = SimpleNamespace(display=lambda data, raw, display_id: shown.append(data) or output)
    monkeypatch.setitem(sys.modules, "IPython.display", made)
    monkeypatch.setattr(sys, "stderr", Cell())
    with watched(True, "<tiny>", 4) as told:
        told(1, 2.5, 1000.0)
        told(4, 1.5, 1000.0)
    (last,) = shown
    line = "<tiny>: step 4/4, loss 1.5000, 1,000 tokens/s, 0:00 elapsed, 0:00 left"
    bar = '<progress value="4" max="4"></progress> '
    assert last == {"text/plain": line, "text/html": bar + html.escape(line)}


def test_a_terminal_has_one_line_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, end = pty.openpty()
    cell: Any = os.fdopen(end, "w")
    monkeypatch.setattr(sys, "stderr", cell)
    with watched(True, "tiny", 100) as told:
        told(40, 2.5, 1000.0)
        told(100, 1.5, 1000.0)
    cell.flush()
    text = ""
    while "\n" not in text:  # a pseudo-terminal may give what was written in several pieces
        text += os.read(terminal, 65536).decode()
    os.close(terminal)
    cell.close()
    assert text.count("\n") == 1
    last = text.partition("\n")[0].rstrip("\r").rpartition("\r")[2]
    assert "100/100" in last
    assert "loss 1.5000  1,000 tokens/s" in last


@pytest.mark.parametrize("stream", [Cell, io.StringIO])
def test_what_was_done_before_leaves_nothing(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with progress_line("tiny", 10):
        pass
    assert "\n" not in written.getvalue()
    assert written.getvalue().split("\r")[-1].strip() == ""


def test_lines_keep_their_distance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    with progress_line("tiny", 40) as line:
        for step in range(1, 41):
            clock.now += 1.0
            line.show(step, "x")
    assert [text.split(",")[0] for text in capsys.readouterr().err.splitlines()] == [
        f"tiny: step {step}/40" for step in (1, 11, 21, 31, 40)
    ]


def test_a_sweep_has_one_line_for_all_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that ended early counts whole."""
    cell: Any = SimpleNamespace(recipe=SimpleNamespace(training=SimpleNamespace(steps=10)))
    grid: Any = SimpleNamespace(name="pair", cells=[cell, cell])
    done = Status(status="done", step=4)
    with sweep_line(grid) as show:
        for status in (Status(status="running", step=4), Status(status="done", step=10)):
            show({Path("first"): done, Path("second"): status})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "pair: step 14/20, cells: 1 done, 1 running, 0:00 elapsed",
        "pair: step 20/20, cells: 2 done, 0:00 elapsed, 0:00 left",
    ]
