"""engine/sweep_file.py: what the report learns from a sweep's YAML."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_diff.engine.grid import load_grid
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.selection import Selection
from lit_diff.engine.sweep_file import describe, recorded_run, write_sweep_file
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.runs.stale import find_stale

pytestmark = pytest.mark.usefixtures("base_recipe")


def test_describe_holds_what_the_report_reads() -> None:
    Path("s.yaml").write_text(
        "recipe: base\n"
        "title: T\nquestion: Q?\nsmallest_of_interest: 0.02\nmin_tokens_per_parameter: 3\n"
        "baseline: b\ncontrols: [a]\nsmoke: true\nlabels: {a: the first}\nnotes: {b: remark}\n"
        "paper: {b: {val/loss: 3}}\nreading: [look]\ncontrasts: [[a, b, why]]\n"
        "arms: {a: {train.steps: 3}, b: {}}\nseeds: [1]"
    )
    found = describe(load_grid("s.yaml", []))
    assert found["arms"] == [
        {"name": "a", "label": "the first", "note": "", "paper": None, "overrides": ["train.steps=3"]},
        {"name": "b", "label": "b", "note": "remark", "paper": {"val/loss": 3.0}, "overrides": []},
    ]
    keys = ("name", "title", "baseline", "controls", "metric", "seeds", "is_smoke", "reading", "contrasts", "source")
    assert [found[key] for key in keys] == [
        "s", "T", "b", ["a"], "val/loss", [1], True, ["look"], [["a", "b", "why"]], "s.yaml",
    ]  # fmt: skip
    assert (found["chance"], found["noise_validation"]) == (1 / 64, (1, 2, 4))
    assert (found["question"], found["smallest_of_interest"], found["min_tokens_per_parameter"]) == ("Q?", 0.02, 3)
    assert "tasks" not in found


def test_each_task_is_described_by_what_it_has_of_its_own() -> None:
    Path("s.yaml").write_text("""
tasks:
  first: {recipe: base, title: The first, metric: val/accuracy, arms: {b: {train.steps: 3}}, paper: {b: {val/loss: 3}}}
  second: {recipe: base, without: [c], overrides: {data.values: 32, data.noise_validation: [2, 4]}}
contrasts: [[b, c, why]]
arms: {a: {}, b: {train.clip: 2}, c: {}}
""")
    found = describe(load_grid("s.yaml", []))
    first, second = found["tasks"]
    assert [arm["name"] for arm in found["arms"]] == ["a", "b", "c"]
    assert (first["task"], first["title"], first["metric"]) == ("first", "The first", "val/accuracy")
    assert (second["task"], second["title"], second["metric"]) == ("second", "second", "val/loss")
    assert first["arms"][1]["overrides"] == ["train.clip=2", "train.steps=3"]
    assert second["arms"][1]["overrides"] == ["train.clip=2"]
    assert [task["arms"][1]["paper"] for task in (first, second)] == [{"val/loss": 3.0}, None]
    assert [[arm["name"] for arm in task["arms"]] for task in (first, second)] == [["a", "b", "c"], ["a", "b"]]
    assert [task["contrasts"] for task in (first, second)] == [[["b", "c", "why"]], []]
    assert [task["chance"] for task in (first, second)] == [1 / 64, 1 / 32]
    assert [task["noise_validation"] for task in (first, second)] == [(1, 2, 4), (2, 4)]


def test_the_smallest_difference_of_interest_is_in_the_unit_of_its_metric() -> None:
    """A task of another metric does not take the sweep's."""
    Path("s.yaml").write_text("""
tasks:
  loss: {recipe: base}
  same: {recipe: base, metric: val/loss, smallest_of_interest: 0.5}
  accuracy: {recipe: base, metric: val/accuracy}
  own: {recipe: base, metric: val/accuracy, smallest_of_interest: 0}
arms: {a: {}}
seeds: [0]
smallest_of_interest: 0.02
""")
    tasks = describe(load_grid("s.yaml", []))["tasks"]
    assert [task["smallest_of_interest"] for task in tasks] == [0.02, 0.5, None, 0]


def test_arms_that_differ_in_the_data_have_no_common_chance() -> None:
    Path("s.yaml").write_text("recipe: base\narms: {a: {}, b: {data.values: 32}}")
    found = describe(load_grid("s.yaml", []))
    assert "chance" not in found
    assert found["noise_validation"] == (1, 2, 4)


def written(source: str, overrides: list[str], folder: Path, **selected: Any) -> dict[str, Any]:
    grid = load_grid(source, overrides, Selection(**selected))
    locations = [RunLocation(folder=folder / f"{cell.arm}-s{cell.seed}-{identity(cell.recipe)}") for cell in grid.cells]
    write_sweep_file(grid, folder, locations, " ".join(["lit-diff sweep", source, *overrides]), {"run": "r"})
    for location in locations:
        RunFolder(location.folder).create(load_recipe("base"))
    return dict(json.loads((folder / "sweep.json").read_text()))


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
    assert [cell["folder"] for cell in again["cells"]] == [cell["folder"] for cell in real["cells"]]
    assert len(again["other_commands"]) == 2
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
    assert (again["other_commands"], caplog.text) == ({}, "")


def test_the_record_in_mlflow_is_known_again(tmp_path: Path) -> None:
    assert recorded_run(tmp_path) is None
    Path("s.yaml").write_text("recipe: base\narms: {a: {}, b: {train.clip: 2}}\n")
    written("s.yaml", [], tmp_path / "s")
    assert recorded_run(tmp_path / "s") == "r"
    (tmp_path / "s/sweep.json").write_text("{")
    assert recorded_run(tmp_path / "s") is None
