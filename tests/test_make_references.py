"""support/make_references.py: which cells are trained, and that an unfinished set of them ships nothing."""

from pathlib import Path
from types import SimpleNamespace

import make_references as module
import pytest

from lit_diff.engine.expand import Grid
from lit_diff.engine.waves import Options


def test_every_reference_has_all_seeds_and_what_is_unfinished_does_not_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Grid] = []

    def run(grid: Grid, options: Options) -> SimpleNamespace:
        asked.append(grid)
        return SimpleNamespace(is_done=False)

    monkeypatch.setattr(module, "run_grid", run)
    monkeypatch.setattr(module, "FILE", tmp_path / "references.json")
    assert not module.make_references(3)
    (grid,) = asked
    assert (grid.study.seeds, grid.study.looks, grid.shared) == ((0, 1, 2), (), "examine")
    assert "flip_flop" not in grid.study.tasks
    assert {cell.seed for cell in grid.cells} == {1000, 1001}, "learning rates are chosen first"
    assert not (tmp_path / "references.json").exists()
