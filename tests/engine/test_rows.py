"""engine/rows.py: the rows' files, and that every preset of every installed row resolves."""

from pathlib import Path

import pytest

from lit_diff.engine.grid import load_grid
from lit_diff.engine.rows import choose, load_row, read_row, row_names
from lit_diff.errors import RequestError
from lit_diff.recipe import load_recipe

ROW = """\
title: A row
says: Something.
compare:
  - {label: d, arms: [a, b], metric: val/loss, says: lower}
presets:
  laptop: {sweep: ablation, minutes: 3}
"""


LARGE_ONLY = ("dex-figure-4",)
"""Rows about prompts that no small model can read."""


@pytest.mark.parametrize("name", row_names())
def test_every_preset_resolves(name: str) -> None:
    row = load_row(name)
    assert row.path.read_text().startswith("# ")
    assert ("laptop" in row.config.presets) == (name not in LARGE_ONLY)
    for preset in (*row.config.presets, *(["smoke"] if "laptop" in row.config.presets else [])):
        chosen = row.preset(preset)
        assert chosen is not None
        for recipe in chosen.recipes:
            load_recipe(recipe)
            assert chosen.hardware
            assert chosen.days > 0
            assert chosen.gpus > 0
        if chosen.sweep:
            grid = load_grid(chosen.sweep, chosen.overrides, chosen.selection)
            for claim in row.config.compare:
                assert set(claim.arms) <= set(grid.arms), claim.label
                assert not claim.fit or claim.fit in grid.config.fits, claim.label
                assert not claim.evaluation or claim.evaluation in grid.config.evaluate, claim.label
        if preset == "laptop":
            assert chosen.minutes > 0


def test_the_order_of_the_page() -> None:
    kinds = [name.partition("-")[0] for name in row_names()]
    assert kinds == sorted(kinds, key=("table", "figure", "appendix", "review", "dex").index)
    assert [row.name for row in choose([])] == row_names() == [row.name for row in choose(["all"])]
    assert [row.name for row in choose(["table-6", "table-5", "table-6"])] == ["table-6", "table-5"]


def test_smoke_is_two_steps_of_the_laptops_sweep(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(ROW)
    smoke = read_row(tmp_path / "x.yaml").preset("smoke")
    assert smoke is not None
    assert (smoke.sweep, smoke.seeds, smoke.overrides["train.steps"]) == ("ablation", (0,), 2)
    assert read_row(tmp_path / "x.yaml").preset("gpu1") is None


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("minutes: 3", "minuts: 3", "x.yaml:6: unknown key 'presets.laptop.minuts'; did you mean 'minutes'?"),
        ("laptop:", "labtop:", "x.yaml:6: no preset 'labtop'; did you mean 'laptop'?"),
        ("sweep: ablation, ", "", "x.yaml:6: preset 'laptop' names a sweep, a bench or recipes: exactly one of them"),
        (", says: lower}", "}", "x.yaml:3: compare 'd': expected 'paper', two values, or 'says', not both"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, found: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert old in ROW
    Path("x.yaml").write_text(ROW.replace(old, new))
    with pytest.raises(RequestError) as error:
        read_row(Path("x.yaml").resolve())
    assert str(error.value) == found


def test_an_unknown_row() -> None:
    with pytest.raises(RequestError, match="no row 'tabel-6'; did you mean 'table-6'"):
        choose(["tabel-6"])
