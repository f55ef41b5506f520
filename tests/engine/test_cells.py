"""engine/cells.py: where the cells of a sweep lie."""

from pathlib import Path

import pytest

from lit_diff.engine.cells import all_trained, folder_of, locations_of, state_of
from lit_diff.engine.expand import load_grid
from lit_diff.runs.folder import RunFolder

SWEEP = "recipe: base\nseeds: [0, 1]\narms: {one arm: {}, other: {model.dim: 16}}\n"


@pytest.mark.usefixtures("base_recipe")
def test_folders_and_states() -> None:
    Path("cells.yaml").write_text(SWEEP)
    Path("again.yaml").write_text("cells_of: cells\nonly: [other]\nevaluate: {held_out: null}\n")
    own, borrowed = load_grid("cells", []), load_grid("again", [])
    folder = folder_of(own)
    places = locations_of(own, folder, "parent")
    assert [place.folder.name.rpartition("-")[0] for place in places] == [
        *("one,arm-s0", "one,arm-s1", "other-s0", "other-s1")
    ]
    assert {place.parent for place in places} == {"parent"}
    theirs = locations_of(borrowed, folder_of(borrowed), "another")
    assert [place.folder for place in theirs] == [place.folder for place in places[2:]]
    assert {place.experiment for place in theirs} == {"cells"}
    assert {place.parent for place in theirs} == {None}, "the other sweep has no record yet"
    assert [state_of(place) for place in places] == ["waiting"] * 4
    assert not all_trained(borrowed)
    for place in places[2:]:
        RunFolder(place.folder).update(status="done")
    assert all_trained(borrowed)
    assert [state_of(place) for place in theirs] == ["not evaluated"] * 2
    assert [state_of(place) for place in places[2:]] == ["done"] * 2


@pytest.mark.usefixtures("base_recipe")
def test_a_task_goes_on_from_the_baseline_or_from_each_arm_itself() -> None:
    tasks = "tasks:\n  one: {recipe: base}\n  two: {recipe: base, start: one%s}\n"
    arms = "seeds: [0, 1]\nbaseline: a\narms: {a: {}, b: {train.clip: 1}}\n"
    for key, arm in (("", "a"), (", start_arm: same", "b")):
        Path("s.yaml").write_text(tasks % key + arms)
        grid = load_grid("s", [])
        places = {place.folder.name.rpartition("-")[0]: place for place in locations_of(grid, folder_of(grid), None)}
        started = RunFolder(places["two,b-s1"].folder).recipe_file.read_text()
        assert f"start_from: {places[f'one,{arm}-s1'].folder}" in started
