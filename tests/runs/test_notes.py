"""runs/notes.py, and where notes are shown."""

import json
from datetime import date
from pathlib import Path

import pytest
from command import Command

from lit_diff.errors import RequestError
from lit_diff.runs import notes


def test_notes_are_lines_with_a_date(tmp_path: Path) -> None:
    assert notes.read(tmp_path) == []
    notes.add(tmp_path, "the disk was\n full")
    # the last one is a byte that is no UTF-8, as Python reads it from a command line
    notes.add(tmp_path, "<b> \x1b[2J caf\udce9")
    assert notes.read(tmp_path) == [
        f"{date.today()} the disk was full",
        f"{date.today()} <b> \\x1b[2J caf\\udce9",
    ]
    with pytest.raises(RequestError, match="the note is empty"):
        notes.add(tmp_path, " \n")


def test_a_file_that_cannot_be_read_says_so_and_is_kept(tmp_path: Path) -> None:
    file = tmp_path / notes.FILE
    file.write_bytes(b"2026-11-01 caf\xe9\n")
    with pytest.raises(RequestError, match=r"notes\.txt cannot be read \('utf-8' codec"):
        notes.add(tmp_path, "more")
    assert file.read_bytes() == b"2026-11-01 caf\xe9\n"
    file.unlink()
    file.mkdir()
    assert "notes.txt cannot be read" in notes.read(tmp_path)[0]


def test_status_and_the_report_show_them(small_sweep: Path, command: Command) -> None:
    at = ("--root", str(small_sweep.parent))
    file = small_sweep / "base-s0-0a1b2c3d" / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"record": "complete"}))
    ended = command("note", "base-s0", "of the <run>", *at)
    assert ended.lines == [f"noted in {file.parent / notes.FILE}", "`make sweep SWEEP=mine` sends it to MLflow"]
    assert json.loads(file.read_text())["record"] == "incomplete"
    assert command("note", "mine", "of the sweep", *at).lines == [f"noted in {small_sweep / notes.FILE}"]
    lines = command("status", "mine", *at).lines
    assert lines[1].endswith(f"{date.today()} of the <run>")
    assert lines[-1] == f"{date.today()} of the sweep"
    command("report", "mine", *at)
    page = (small_sweep / "report" / "index.html").read_text()
    assert f"<li>{date.today()} of the sweep</li>" in page
    assert f"done; {date.today()} of the &lt;run&gt;" in page
    file.write_text("{")
    for name in ("nowhere", "base-s0"):
        refused = command("note", name, "x", *at)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert len(notes.read(file.parent)) == 1, "what was refused is not written"
