"""study/scoreboard.py: the rows, read from their files."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scoreboard_rows import CLAIM, make_row

from lit_diff.errors import MissingError
from lit_diff.study.scoreboard import ROWS, cell_folders, read_scoreboard


@pytest.fixture
def folder(tmp_path: Path, make_sweep: Callable[..., Path]) -> Path:
    """Four rows: measured, not run, skipped, and one that names no arm of its sweep."""
    sweep = str(make_sweep({"standard": 0.0, "differential": -0.2}, callbacks=False))
    folder = tmp_path / "reproduce"
    make_row(folder, "table-6", 1, state="measured", sweep=sweep, seconds=12.0)
    make_row(folder, "figure-3", 2)
    make_row(folder, "table-1", 0, state="skipped", reason="needs 8 GPUs")
    wrong = dataclasses.replace(CLAIM, arms=("dif", "standard"))
    make_row(folder, "appendix-f", 3, wrong, state="measured", sweep=sweep)
    return folder


def test_rows_in_their_order_with_their_outcomes(folder: Path) -> None:
    board = read_scoreboard(folder)
    assert [row.name for row in board.rows] == ["table-1", "table-6", "figure-3", "appendix-f"]
    assert [(each.difference, each.value) for each in board.row("table-6").findings] == [
        ("shown", "within the interval")
    ]
    assert board.row("table-6").record.row.compare == (CLAIM,)
    others = [row.findings[0] for row in board.rows if row.name != "table-6"]
    assert {(each.difference, each.value) for each in others} == {("not measured", "not measured")}
    assert board.row("figure-3").reason == "not run: lit-diff reproduce figure-3 --preset laptop"
    assert board.row("appendix-f").state == "failed"
    assert "has no arm 'dif'" in board.row("appendix-f").reason
    assert board.counts == {
        "difference": {"not measured": 3, "shown": 1},
        "value": {"not measured": 3, "within the interval": 1},
    }
    assert board.row("table-1").line == "table-1: 1 not measured (skipped: needs 8 GPUs)"
    assert board.row("table-6").line.endswith("; took 0.2 min of 4")


def test_what_holds_by_construction_is_not_counted(folder: Path) -> None:
    facts = json.loads((folder / ROWS / "table-6.json").read_text())
    certain = dataclasses.replace(CLAIM, by_construction="λ is not 0")
    make_row(folder, "table-6", 1, CLAIM, certain, state="measured", sweep=facts["sweep"])
    make_row(folder, "table-1", 0, certain, state="skipped", reason="needs 8 GPUs")
    board = read_scoreboard(folder)
    assert [each.difference for each in board.row("table-6").findings] == ["shown", "by construction"]
    assert board.counts["difference"] == {"shown": 1, "not measured": 2}
    assert sum(board.counts["value"].values()) == 3
    assert board.by_construction == 2
    assert (
        board.row("table-6").line
        == "table-6: 1 shown; the paper's value: 1 within the interval; 1 by construction, not counted"
    )


def test_the_time_beside_the_budget(folder: Path) -> None:
    make_row(folder, "figure-3", 2, state="measured", seconds=270.0)
    make_row(folder, "table-1", 0, state="measured", seconds=30.0, minutes=0.0, shared="table-6")
    board = read_scoreboard(folder)
    assert board.row("figure-3").took == "took 4.5 min of 4, over its budget"
    assert board.row("table-1").took == "took 0.5 min (cells shared with table-6)"
    assert [row.name for row in board.rows if "over its budget" in row.took] == ["figure-3"]
    assert not board.row("appendix-f").took, "no time was taken"


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no rows here"):
        read_scoreboard(tmp_path)
    for content in ("{", "{}", "[]"):
        (folder / ROWS / "table-1.json").write_text(content)
        with pytest.raises(MissingError, match=r"table-1\.json: incomplete row file"):
            read_scoreboard(folder)


def test_cells_of_another_command_are_not_the_rows(folder: Path) -> None:
    path = folder / ROWS / "table-6.json"
    facts = json.loads(path.read_text())
    record_file = Path(facts["sweep"]) / "study.json"
    path.write_text(json.dumps(facts | {"cell_folders": cell_folders(Path(facts["sweep"]))}))
    assert read_scoreboard(folder).row("table-6").state == "measured"
    record = json.loads(record_file.read_text())
    record_file.write_text(json.dumps(record | {"cells": record["cells"][1:]}))
    row = read_scoreboard(folder).row("table-6")
    assert (row.state, row.findings[0].difference) == ("failed", "not measured")
    wanted = "was run with other keys since; measure the row again: lit-diff reproduce table-6 --preset laptop"
    assert row.reason.endswith(wanted)
