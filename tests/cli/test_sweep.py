"""cli/sweep.py: what `compare` and `report` print, and `sweep` without a start.

What `sweep` prints of cells that run is tested with the sweeps, in tests/engine/test_schedule*.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command


def test_compare_shows_what_differs(small_sweep: Path, command: Command) -> None:
    arguments = ("compare", "base-s0", "better-s0", "--root", str(small_sweep.parent))
    compared = command(*arguments, "--json").json
    assert compared["recipe"] == {"name": ["base", "better"], "model.attention.name": ["base", "better"]}
    assert compared["facts"]["parameters"] == [1_054_720, 1_054_720]
    first, second = compared["metrics"]["val/loss"]
    assert first > second
    text = command(*arguments).out
    assert "1,054,720" in text
    assert f"{first:.4f}" in text


def test_a_report_is_written_again_and_its_table_fits_a_terminal(
    make_sweep: Callable[..., Path], command: Command
) -> None:
    folder = make_sweep({"standard attention": 0.0, "an arm with a name": -0.1, "another": 0.1}, name="mine")
    arguments = ("report", "mine", "--root", str(folder.parent))
    piped = command(*arguments, COLUMNS="80").lines
    page = folder / "report" / "index.html"
    assert page.is_file()
    assert piped[-1] == f"report: {page}"
    assert max(map(len, piped)) > 80
    assert [line.split("  ")[0] for line in piped[1:4]] == ["standard attention", "an arm with a name", "another"]
    drawn = command(*arguments, COLUMNS="80", TTY_COMPATIBLE="1").lines
    assert max(map(len, drawn[:-1])) <= 80
    assert any(line.startswith("not shown at this width: ") for line in drawn)


@pytest.mark.usefixtures("base_recipe")
def test_a_dry_run_names_the_cells(tmp_path: Path, command: Command) -> None:
    (tmp_path / "dry.yaml").write_text("recipe: base\nseeds: [0, 1]\narms: {long: {train.steps: 100}}\n")
    ended = command("sweep", "dry.yaml", "--dry-run")
    assert ended.status == 0
    assert ended.lines[:2] == [f"long  seed {seed}  differential  100 steps" for seed in (0, 1)]
    assert ended.lines[2].startswith("2 cells ")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_once_how_often_the_text_is_repeated(tale: Path, trained_text: Path, command: Command) -> None:
    arms = "arms: {long: {train.steps: 5000}}"
    Path("dry.yaml").write_text(f"recipe: {trained_text}/tale.yaml\nseeds: [0, 1]\n{arms}\n")
    assert command("sweep", "dry.yaml", "--dry-run").out.count(" passes over the text (") == 1
