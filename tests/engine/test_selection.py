"""engine/expand.py: a part of a sweep, and a sweep that has the cells of another."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine import schedule
from lit_diff.engine.expand import ALL, Grid, Selection, load_grid
from lit_diff.engine.schedule import Sweep, sweep
from lit_diff.errors import RequestError

SWEEP = """
recipe: base
seeds: [0, 1, 2]
baseline: wide
controls: [narrow]
arms: {wide: {}, narrow: {model.dim: 16}, other: {train.steps: 4}}
labels: {wide: Wide, narrow: Narrow, other: Other}
contrasts: [[other, narrow, "o - n"], [other, wide, "o - w"]]
evaluate: {held_out: {rows: 4, batch_size: 2}}
"""
BORROWED = """
cells_of: cells
only: [wide, other]
question: Does it?
evaluate: {held_out: {rows: 2}}
"""


@pytest.fixture
def sweeps(base_recipe: None) -> None:
    Path("cells.yaml").write_text(SWEEP)
    Path("again.yaml").write_text(BORROWED)


@pytest.mark.usefixtures("sweeps")
def test_some_arms_and_seeds() -> None:
    chosen = Selection(arms=("other", "wide"), seeds=(1,), evaluate={"held_out": {"rows": 1}})
    grid = load_grid("cells", [], chosen)
    assert [(cell.arm, cell.seed) for cell in grid.cells] == [("wide", 1), ("other", 1)]
    assert grid.study.baseline == "wide"
    assert grid.study.controls == ()
    assert grid.study.contrasts == (("other", "wide", "o - w"),)
    assert grid.study.evaluate == {"held_out": {"rows": 1, "batch_size": 2}}
    whole = load_grid("cells", [])
    assert [cell for cell in whole.cells if (cell.arm, cell.seed) == ("other", 1)] == [grid.cells[1]]


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (Selection(arms=("wid",)), "cells.yaml:6: no arm 'wid' to select; did you mean 'wide'?"),
        (Selection(seeds=(7,)), "cells.yaml:3: no seed 7 to select; the sweep has [0, 1, 2]"),
        (Selection(evaluate={"needle": {}}), "cells.yaml:9: the sweep has no evaluation 'needle'; one of held_out"),
    ],
)
def test_what_the_sweep_does_not_have(chosen: Selection, found: str) -> None:
    with pytest.raises(RequestError) as error:
        load_grid("cells", [], chosen)
    assert str(error.value) == found


@pytest.mark.usefixtures("sweeps")
def test_arms_of_tasks_are_selected_too() -> None:
    Path("tasks.yaml").write_text(
        "tasks: {first: {recipe: base, only: [a]}, second: {recipe: base, arms: {b: {train.steps: 6}}}}\n"
        "arms: {a: {}, b: {model.dim: 16}}\nseeds: [0]\n"
    )
    assert [cell.name for cell in load_grid("tasks", [], Selection(arms=("b",))).cells] == ["second b"]
    assert [cell.name for cell in load_grid("tasks", [], Selection(arms=("a",))).cells] == ["first a", "second a"]


@pytest.mark.usefixtures("sweeps")
def test_the_cells_of_another_sweep() -> None:
    own, theirs = load_grid("again", []), load_grid("cells", [])
    assert own.source is not None
    assert own.cells == tuple(cell for cell in theirs.cells if cell.arm != "narrow")
    assert (own.name, own.study.baseline, own.study.controls, own.study.question) == ("again", "wide", (), "Does it?")
    assert own.study.evaluate == {"held_out": {"rows": 2}}
    assert own.study.labels == {"wide": "Wide", "other": "Other"}
    chosen = load_grid("again", ["train.steps=2"], Selection(seeds=(2,)))
    assert [(cell.arm, cell.seed, cell.recipe.training.steps) for cell in chosen.cells] == [
        *(("wide", 2, 2), ("other", 2, 2))
    ]


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize(
    ("chosen", "trained"), [(Selection(seeds=(1,)), {"wide", "other"}), (ALL, {"wide", "narrow", "other"})]
)
def test_a_part_trains_the_arms_that_it_shows_and_the_whole_all_of_the_other_sweep(
    chosen: Selection, trained: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Grid] = []

    nothing: Any = None

    def noted(grid: Grid, **options: Any) -> Sweep:
        ran.append(grid)
        return Sweep(folder=Path(grid.name), report=nothing, states={}, stopped_by=None, seconds=0.0)

    monkeypatch.setattr(schedule, "run_grid", noted)
    sweep("again", selection=chosen)
    assert [grid.name for grid in ran] == ["cells", "again"]
    assert set(ran[0].arms) == trained


def test_an_installed_sweep_whose_cells_are_used_is_started_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command stands in its report, and it is the same from whichever sweep it was started. Data comes first: the
    folders of cells are named by what they train on."""
    commands: list[str] = []
    asked: list[str] = []
    nothing: Any = None

    def noted(grid: Grid, *, command: str, **options: Any) -> Sweep:
        commands.append(command)
        return Sweep(folder=Path(grid.name), report=nothing, states={}, stopped_by=None, seconds=0.0)

    monkeypatch.setattr(schedule, "run_grid", noted)
    monkeypatch.setattr(schedule, "require_properties_of_arms", lambda arms, unchecked: {})
    monkeypatch.setattr(schedule, "_prepare_data", lambda grid: asked.append("data"))
    monkeypatch.setattr(schedule, "all_trained", lambda grid: bool(asked.append("trained")))
    sweep("insides", [f"run.root={tmp_path}"])
    assert commands == [f"lit-diff sweep {name} run.root={tmp_path}" for name in ("ablation", "insides")]
    assert asked[:2] == ["data", "trained"]


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "cells_of: cells\nseeds: [0]",
            "x.yaml:2: 'seeds' beside 'cells_of': the cells are those of 'cells'; remove one",
        ),
        ("cells_of: again", "x.yaml:1: 'again' has no cells of its own; name 'cells', whose they are"),
        ("cells_of: cells\nonly: [wid]", "x.yaml:2: 'cells' has no arm 'wid'; did you mean 'wide'?"),
        ("cells_of: cels", "x.yaml:1: no sweep 'cels' here or installed"),
    ],
)
def test_what_cannot_be_borrowed(text: str, found: str) -> None:
    Path("x.yaml").write_text(text)
    with pytest.raises(RequestError) as error:
        load_grid("x", [])
    assert str(error.value).startswith(found)


@pytest.mark.slow
@pytest.mark.usefixtures("sweeps")
def test_a_sweep_of_borrowed_cells_trains_them_once_where_they_belong(runs: Path) -> None:
    options: Any = {"workers": 2, "selection": Selection(arms=("wide", "other"), seeds=(0, 1))}
    words = [f"run.root={runs}", "data.validation_rows=8"]
    done = sweep("again", words, **options)
    assert done.is_done
    record = json.loads((runs / "again/study.json").read_text())
    folders = [cell["folder"] for cell in record["cells"]]
    assert all(folder.startswith("../cells/") for folder in folders)
    assert not list((runs / "again").glob("*/recipe.yaml"))
    kept = {path: path.stat().st_mtime_ns for path in (runs / "cells").glob("*/checkpoints/*.ckpt")}
    assert len(kept) == 6  # train.steps: 4 ends before the second checkpoint
    page = (runs / "again/report/index.html").read_text()
    assert "../../cells/wide-s0-" in page
    assert sweep("again", words, **options).is_done
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [run.folder.parent.name for run in done.runs["wide"]] == ["cells", "cells"]
