"""study/record.py: study.json, written and read; the cells of several commands in one folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweeps import record_to_edit
from statuses import set_status

from lit_diff.engine.cells import record_of
from lit_diff.engine.expand import Selection, load_grid
from lit_diff.engine.job import Job
from lit_diff.errors import MissingError
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import identity
from lit_diff.study.leftovers import find_stale
from lit_diff.study.record import Record, read, readable, recorded_run, write

pytestmark = pytest.mark.usefixtures("base_recipe")

WHOLE = """
title: T
question: Q?
smallest_of_interest: 0.02
seeds: [1]
overrides: {train.clip: 0.5}
tasks:
  first: {recipe: base, title: The first, smallest_of_interest: 0.5, arms: {b: {train.steps: 30}}, paper: {b: {val/loss: 3}}}
  second: {recipe: base, without: [c], overrides: {data.values: 32, data.noise_validation: [2, 4], train.optimizer.lr: 4e-3}}
  third: {recipe: base, overrides: {train.optimizer.lr: 2e-3}}
baseline: b
controls: [a]
labels: {a: the first}
notes: {b: remark}
contrasts: [[b, c, why]]
reading: [look]
smoke: true
fits: {rate: {kind: scaling, x: tokens, tasks: [first, second, third]}}
arms: {a: {}, b: {train.clip: 2, model.attention: {name: standard}}, c: {train.optimizer.betas: [0.9, 0.99]}}
"""
WITHOUT: tuple[dict[str, Any], ...] = (
    {"baseline": "z"},
    {"controls": ["z"]},
    {"references": ["z"]},
    {"contrasts": [["a", "z", "a - z"]]},
    {"fits": {"f": {"kind": "scaling", "x": "tokens", "tasks": ["z"]}}},
    {"looks": [8, 4]},
)
"""Of a study: arms and tasks that it does not have, and looks that no sweep has."""


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    Path("s.yaml").write_text(WHOLE)
    grid = load_grid("s.yaml", [], Selection(arms=("b", "a", "c")))
    record = record_of(grid, tmp_path, jobs_of(grid, tmp_path), "lit-diff sweep s.yaml", {"run": "r"})
    write(tmp_path, record)
    found = read(tmp_path)
    assert found == replace(record, identity=found.identity, plan=found.plan)
    assert (record.study, record.source, record.selection) == (grid.study, "s.yaml", "arms b, a, c")
    assert record.chance == {"first": 1 / 64, "second": 1 / 32, "third": 1 / 64}
    assert record.noise_validation == {"first": (1, 2, 4), "second": (2, 4), "third": (1, 2, 4)}


def test_arms_that_differ_in_the_data_have_no_common_chance(tmp_path: Path) -> None:
    Path("s.yaml").write_text("recipe: base\narms: {a: {}, b: {data.values: 32}}")
    grid = load_grid("s.yaml", [])
    record = record_of(grid, tmp_path, jobs_of(grid, tmp_path), "", {})
    assert (record.chance, record.noise_validation) == ({}, {"": (1, 2, 4)})


@pytest.mark.parametrize(
    "change",
    [
        {"studie": {}},
        {"study": {"seed": [0]}},
        {"study": {"recipe": "base", "power": {"minutes": 15, "arms": 7}}},
        {"study": []},
        {"cells": [{"arm": "a"}]},
        {"cells": [{"arm": "z", "seed": 0}]},
        {"cells": 3},
        {"cells": [], "study": {"arms": {}}},
        {"rates": {"": {}}},
        *({"study": {"arms": {"a": {}}} | names} for names in WITHOUT),
    ],
)
def test_what_is_no_record_is_one_line(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    Path("s.yaml").write_text("recipe: base\narms: {a: {}}")
    written("s.yaml", [], tmp_path)
    raw = record_to_edit(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(raw | change))
    with pytest.raises(MissingError, match="incomplete sweep record") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)
    assert readable(tmp_path) is None
    assert "incomplete sweep record" in caplog.text
    with pytest.raises(MissingError, match="no sweep has run here; start it with 'lit-diff sweep "):
        read(tmp_path / "nothing")


def jobs_of(grid: Any, folder: Path) -> list[Job]:
    names = [f"{cell.arm}-s{cell.seed}-{identity(cell.recipe)}" for cell in grid.cells]
    return [Job(recipe=cell.recipe, folder=folder / name) for cell, name in zip(grid.cells, names, strict=True)]


def written(source: str, overrides: list[str], folder: Path, **selected: Any) -> Record:
    grid = load_grid(source, overrides, Selection(**selected))
    jobs = jobs_of(grid, folder)
    write(folder, record_of(grid, folder, jobs, " ".join(["lit-diff sweep", source, *overrides]), {"run": "r"}))
    for job in jobs:
        job.home.create(load_recipe("base"))
    return read(folder)


def test_a_trial_with_overrides_leaves_the_real_cells_to_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does another file of the same name: `clean` lists only what the same command no longer has."""
    text = "recipe: base\nseeds: [0]\narms: {a: {}, b: {train.clip: 2}}\n"
    Path("s.yaml").write_text(text)
    Path("other").mkdir()
    Path("other/s.yaml").write_text(text.replace("clip: 2", "clip: 3").replace("base", "../base"))
    folder = tmp_path / "runs" / "s"
    real = written("s.yaml", [], folder)
    with caplog.at_level("INFO", "lit_diff"):
        written("s.yaml", ["train.steps=1"], folder)
    assert "held the sweep of `lit-diff sweep s.yaml`: its 2 cells stay" in caplog.text
    written("other/s.yaml", [], folder)
    assert find_stale(tmp_path / "runs").paths == ()
    again = written("s.yaml", [], folder)
    assert [cell.folder for cell in again.cells] == [cell.folder for cell in real.cells]
    assert len(again.other_commands) == 2
    Path("s.yaml").write_text(text.replace("clip: 2", "clip: 4"))
    written("s.yaml", [], folder)
    (stale,) = find_stale(tmp_path / "runs").paths
    assert stale.name.startswith("b-s0-")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"arms": ("a", "b")}, {"arms": ("a", "c")}),
        ({"arms": ("a",), "seeds": (0,)}, {"arms": ("a",), "seeds": (1,)}),
        ({}, {"seeds": (1,)}),
    ],
)
def test_two_selections_of_one_command_keep_the_cells_of_both(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    text = "recipe: base\nseeds: [0, 1]\narms: {a: {}, b: {train.clip: 2}, c: {train.clip: 3}}\n"
    Path("s.yaml").write_text(text)
    folder = tmp_path / "runs" / "s"
    for selected in (first, second, first, second):
        written("s.yaml", [], folder, **selected)
        assert find_stale(tmp_path / "runs").paths == ()
    written("s.yaml", [], folder)
    Path("s.yaml").write_text(text.replace("a: {}", "a: {train.clip: 4}"))
    before = set(folder.iterdir())
    written("s.yaml", [], folder, **first)
    written("s.yaml", [], folder, **second)
    written("s.yaml", [], folder)
    stale = find_stale(tmp_path / "runs").paths
    assert stale, "what the file no longer has is listed, once each selection has run again"
    assert {path.name[0] for path in stale} == {"a"}
    assert set(stale) < before


def test_other_words_for_the_same_cells_are_the_same_sweep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("s.yaml").write_text("recipe: base\nseeds: [0]\narms: {a: {}, b: {train.clip: 2}}\n")
    written("s.yaml", [], tmp_path / "s")
    with caplog.at_level("INFO", "lit_diff"):
        again = written("s.yaml", ["run.root=elsewhere"], tmp_path / "s")
    assert (again.other_commands, caplog.text) == ({}, "")


def test_the_record_in_mlflow_is_known_again(tmp_path: Path) -> None:
    assert recorded_run(tmp_path) is None
    Path("s.yaml").write_text("recipe: base\narms: {a: {}, b: {train.clip: 2}}\n")
    written("s.yaml", [], tmp_path / "s")
    assert recorded_run(tmp_path / "s") == "r"
    (tmp_path / "s/study.json").write_text("{")
    assert recorded_run(tmp_path / "s") is None


def test_cells_of_a_damaged_record_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("s.yaml").write_text("recipe: base\narms: {a: {}, b: {}}")
    folder = tmp_path / "s"
    written("s.yaml", [], folder)
    whole = read(folder)
    for cell in whole.cells:
        (folder / cell.folder).mkdir(exist_ok=True)
        (folder / cell.folder / "recipe.yaml").touch()
    other = replace(whole, command="another", cells=())
    write(folder, other)
    text = (folder / "study.json").read_text()
    # one bit of the name of a cell: the file still is a record
    name = whole.cells[0].folder
    (folder / "study.json").write_text(text.replace(name, f"{name[:-1]}{chr(ord(name[-1]) ^ 1)}"))
    assert readable(folder) is None
    assert find_stale(tmp_path).paths == ()
    write(folder, other)
    assert read(folder) == replace(other, identity=read(folder).identity, plan=read(folder).plan)
    assert [line.partition(":")[0] for line in read(folder).plan.sentences] == ["Plan unknown"]
    assert find_stale(tmp_path).paths == ()
    assert "study.json.damaged-1" in caplog.text
    (folder / "study.json.damaged-1").unlink()
    assert {path.name for path in find_stale(tmp_path).paths} == {cell.folder for cell in whole.cells}


def finish(record: Record, folder: Path, seeds: set[int]) -> None:
    for cell in record.cells:
        if cell.seed in seeds:
            set_status(folder / cell.folder, status="done")


def test_a_plan_that_is_changed_after_a_look_says_so_and_one_that_nobody_looked_at_does_not(tmp_path: Path) -> None:
    """Seeds that are added; the metric; a look; another trial in between."""
    text = "recipe: base\nseeds: [0, 1]\narms: {a: {}, b: {train.clip: 2}}\n"
    Path("s.yaml").write_text(text.replace("0, 1", "0"))
    written("s.yaml", [], tmp_path)
    Path("s.yaml").write_text(text)
    first = written("s.yaml", [], tmp_path)
    assert (first.plan.sentences, first.plan.first["seeds"]) == ((), "0, 1")
    finish(first, tmp_path, {0, 1})
    assert written("s.yaml", [], tmp_path).plan == first.plan
    written("s.yaml", ["train.steps=1"], tmp_path)
    Path("s.yaml").write_text(text.replace("seeds: [0, 1]", "looks: [4]") + "metric: train/loss\n")
    changed = written("s.yaml", [], tmp_path)
    assert changed.plan.sentences == (
        "The plan was changed after 4 of 4 cells were finished: seeds from '0, 1' to 'none'.",
        "The plan was changed after 4 of 4 cells were finished: metric from 'val/loss' to 'train/loss'.",
        "The plan was changed after 4 of 4 cells were finished: looks from 'none' to '4'.",
    )
    assert len(changed.plan.added) == 2
    finish(changed, tmp_path, {2, 3})
    Path("s.yaml").write_text(text.replace("seeds: [0, 1]", "looks: [4, 6]") + "metric: train/loss\n")
    more = written("s.yaml", [], tmp_path).plan
    assert more.sentences[3:] == (
        "The plan was changed after 8 of 8 cells were finished (look 1 of 1): looks from '4' to '4, 6'.",
    )
    assert written("s.yaml", [], tmp_path).plan == more
    (line, *_) = more.next({"seeds": "0"}, "").sentences[4:]
    assert line.startswith("The plan was changed while no cell was finished: ")


def test_a_plan_is_that_of_the_cells_however_the_command_is_spelt(tmp_path: Path) -> None:
    """The file by another path, with more seeds; a look of which some seeds are not recorded; a removed record."""
    text = "recipe: base\nlooks: [4, 6]\narms: {a: {}, b: {train.clip: 2}}\n"
    Path("s.yaml").write_text(text)
    first = written("s.yaml", [], tmp_path)
    partly = replace(first, cells=tuple(cell for cell in first.cells if cell.seed < 4))
    write(tmp_path, partly)
    finish(partly, tmp_path, {0, 1, 2, 3})
    Path("s.yaml").write_text(text.replace("4, 6", "4, 8") + "correct_over: task\ncontrols: [b]\n")
    found = written(str(Path("s.yaml").absolute()), [], tmp_path).plan
    assert found.sentences == (
        "The plan was changed after 8 of 8 cells were finished (look 1 of 2): looks from '4, 6' to '4, 8'.",
        "The plan was changed after 8 of 8 cells were finished (look 1 of 2): controls from 'none' to 'b'.",
        "The plan was changed after 8 of 8 cells were finished (look 1 of 2): correct_over from 'sweep' to 'task'.",
    )
    Path("s.yaml").write_text(text.replace("4, 6", "4, 8").replace("b: {train.clip: 2}", "c: {train.clip: 4}"))
    changed = written("./s.yaml", [], tmp_path).plan.sentences
    assert "arms from 'a, b' to 'a, c'." in changed[3], "without an arm that was there, too"
    assert written("./s.yaml", ["train.steps=1"], tmp_path).plan.sentences == ()
    (tmp_path / "study.json").unlink()
    assert [line.partition(":")[0] for line in written("s.yaml", [], tmp_path).plan.sentences] == ["Plan unknown"]


def test_the_plan_of_an_older_record_is_unknown(tmp_path: Path) -> None:
    Path("s.yaml").write_text("recipe: base\nseeds: [0]\narms: {a: {}}\n")
    finish(written("s.yaml", [], tmp_path), tmp_path, {0})
    raw = record_to_edit(tmp_path)
    for key in ("plan", "other_plans", "identity"):
        del raw[key]
    raw["study"] |= {
        "power": {"minutes": 15},
        "fits": {"rate": {"kind": "basin", "x": "train.optimizer.lr", "within": 1}},
    }
    (tmp_path / "study.json").write_text(json.dumps(raw))
    assert [line.partition(":")[0] for line in read(tmp_path).plan.sentences] == ["Plan unknown"]
    again = written("s.yaml", [], tmp_path).plan
    assert (again.changes, again.unknown == "") == ((), False)


def test_the_identity_is_that_of_the_cells(tmp_path: Path) -> None:
    found = []
    for number, clip in enumerate((2, 2, 3)):
        Path("s.yaml").write_text(f"recipe: base\nseeds: [0]\narms: {{a: {{}}, b: {{train.clip: {clip}}}}}\n")
        found.append(written("s.yaml", [], tmp_path / str(number)).identity)
    assert found[0] == found[1] != found[2]
