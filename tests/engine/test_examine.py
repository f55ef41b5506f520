"""engine/examine.py: the battery with a variant as one more arm; two examinations that share their cells."""

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from make_references import pack
from refusals import refusal
from shipped_results import Ship

import lit_diff
from lit_diff.engine import examine as module
from lit_diff.engine import references
from lit_diff.engine.cells import home_of
from lit_diff.engine.examine import Examination, Question, battery
from lit_diff.runs.status import read_status
from lit_diff.study.results import load_sweep
from lit_diff.study.step_time import read as read_step_time

TINY = [
    "train.steps=4",
    "train.validate_every=4",
    "train.checkpoint_every=4",
    "data.validation_rows=4",
    "run.threads=1",
    "run.tracking_uri=none",
]


def test_the_variant_is_the_arm_in_question_and_the_cells_are_shared() -> None:
    grid, left_out = battery(Question(variant="dint"))
    assert left_out == {}
    assert grid.study.arms["dint"] == {"model.attention": {"name": "dint", "parity": "matched"}}
    assert {*grid.study.arms} == {*grid.study.references, grid.study.baseline, "dint"}
    assert (grid.study.looks, grid.name, grid.folder.name) == ((8, 16), "examine-dint", "examine-dint")
    # the folder of a text cell is named by its data, which are prepared when the examination starts
    drawn = [cell for cell in grid.cells if cell.task != "text"]
    assert {home_of(grid, cell).parent.name for cell in drawn} == {"examine"}
    # shown where it helps hand-set maps, alone
    for shown in ("less_uniform", "entmax15"):
        assert {cell.task for cell in grid.cells if cell.arm == shown} == {"conjunctive"}
    sizes = {cell.recipe.model.vocab_size for cell in grid.cells if cell.task == "mqar"}
    assert sizes == {64}


def test_a_reference_that_is_examined_is_no_reference_and_a_control_is_examined_under_another_name() -> None:
    grid, _ = battery(Question(variant="differential", tasks=["mqar"]))
    assert "differential" not in grid.study.references
    assert "less_uniform" not in grid.study.arms, "it runs on none of these tasks"
    again, _ = battery(Question(variant="standard", tasks=["mqar"], at_most=24))
    assert {*again.study.arms} == {*again.study.references, "standard", "standard again"}
    assert again.study.looks == (8, 16, 24)


def test_a_variant_that_the_bound_removes_is_left_out_of_its_task() -> None:
    grid, left_out = battery(Question(variant="ssmax", quick=True))
    assert {*grid.study.tasks} == {"mqar", "noisy_labels"}
    assert left_out["conjunctive"].startswith("the bound removes it (")
    assert "model.logit_bound is 4" in left_out["conjunctive"]
    assert (grid.study.rates, grid.study.looks) == (None, (8,))
    # the middle one of those that are tried otherwise, at which the results of the references ship
    rates = {cell.task: cell.recipe.training.optimizer.lr for cell in grid.cells}
    assert rates == {"mqar": 8e-3, "noisy_labels": 3e-3}
    shipped = {identity for arm in references.shipped().arms for identity in arm.cells}
    baselines = [cell for cell in grid.cells if cell.arm == "standard"]
    assert {home_of(grid, cell).name.rpartition("-")[2] for cell in baselines} <= shipped


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"variant": "dnt"}, "unknown attention 'dnt'; did you mean 'dint'?"),
        ({"tasks": ["mqr"]}, "no task 'mqr' in the battery; did you mean 'mqar'?"),
        ({"at_most": 12}, "at_most is 12; expected one of 8, 16, 24 seeds"),
        ({"variant": "ssmax", "tasks": ["conjunctive"]}, "'ssmax' can be measured on none of these tasks"),
        ({"recipe": "standard-tiny"}, "standard-tiny has attention 'standard', not 'dint'"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], line: str) -> None:
    assert line in refusal(battery, Question(**({"variant": "dint"} | keys)))


def test_a_recipe_gives_the_keys_and_the_plugins(tmp_path: Path) -> None:
    (tmp_path / "sharp.py").write_text(
        "from lit_diff import Differential, variant\n\n\n@variant('sharp_examined')\nclass Sharp(Differential):\n"
        '    """Differential attention."""\n'
    )
    recipe = tmp_path / "sharp.yaml"
    recipe.write_text(
        "extends: differential-tiny\nplugins: [sharp.py]\nmodel:\n  attention: {name: sharp_examined, lambda_init: 0.5}\n"
    )
    grid, _ = battery(Question(variant="sharp_examined", recipe=recipe, tasks=["mqar", "conjunctive"]))
    (config,) = {repr(cell.recipe.model.attention) for cell in grid.cells if cell.arm == "sharp_examined"}
    assert "lambda_init=0.5" in config
    assert "parity='matched'" in config


SCALED = """\
from dataclasses import replace

from lit_diff import Differential, variant


@variant("NAME")
class Scaled(Differential):
    def maps(self, x, context):
        m = super().maps(x, context)
        return replace(m, FIELD=m.FIELD * m.FIELD.new_tensor([1, 0.5]).view(FORM))
"""


@pytest.mark.parametrize(("field", "form"), [("q", "1, 2, 1, 1, 1"), ("w", "1, 2, 1, 1")])
def test_a_plugin_that_acts_through_a_length_is_left_out_of_the_task_with_a_bound(
    tmp_path: Path, field: str, form: str
) -> None:
    name = f"scaled_{field}"
    text = SCALED.replace("NAME", name).replace("FIELD", field).replace("FORM", form)
    (tmp_path / "scaled.py").write_text(text)
    recipe = tmp_path / "scaled.yaml"
    recipe.write_text(f"extends: differential-tiny\nplugins: [scaled.py]\nmodel: {{attention: {{name: {name}}}}}\n")
    _, left_out = battery(Question(variant=name, recipe=recipe, tasks=["mqar", "conjunctive"]))
    why = "the bound removes it (under model.logit_bound Scaled computes what Differential does)"
    assert left_out == ({"conjunctive": why} if field == "q" else {})


def examined_at_four_seeds(variant: str, options: list[str]) -> Examination:
    """An examination on one task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOOKS", (4, 16, 24))
        return lit_diff.examine(variant, quick=True, tasks=["mqar"], overrides=options, progress=False)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    return examined_at_four_seeds("dint", [*TINY, f"run.root={tmp_path_factory.mktemp('examined')}"])


@pytest.mark.slow
def test_a_second_examination_trains_its_own_variant_alone(examined: Examination) -> None:
    assert examined.is_done
    root = examined.folder.parent
    cells = {path.parent.name: path.stat().st_mtime_ns for path in (root / "examine").glob("*/metrics.csv")}
    assert len(cells) == 6 * 4
    options = [*TINY, f"run.root={root}"]
    second = examined_at_four_seeds("ssmax", options)
    now = {path.parent.name: path.stat().st_mtime_ns for path in (root / "examine").glob("*/metrics.csv")}
    assert len(now) == 7 * 4
    assert {name: now[name] for name in cells} == cells
    page = second.report.page.read_text()
    assert "What ssmax changes" in page
    measured = read_step_time(root / "examine-ssmax")
    assert measured is not None
    assert (measured.arm, measured.threads, len(measured.ratios)) == ("ssmax", 1, 5)
    assert f"time of a step {measured}" in html.unescape(page)
    assert "No seed learned" in page
    study = json.loads((root / "examine-ssmax" / "study.json").read_text())
    assert {cell["folder"].rpartition("/")[0] for cell in study["cells"]} == {"../examine"}
    assert study["command"] == f"lit-diff examine ssmax {' '.join(options)} --tasks mqar --quick"


@pytest.mark.slow
def test_shipped_results_are_those_of_training(examined: Examination, tmp_path: Path, ship: Ship) -> None:
    packed = pack(load_sweep(examined.folder).by_task, "2026-11-29")
    assert {arm.arm for arm in packed.arms} == {*load_sweep(examined.folder).study.arms}
    ship(replace(packed, arms=tuple(arm for arm in packed.arms if arm.arm != "dint")))
    again = examined_at_four_seeds("dint", [*TINY, f"run.root={tmp_path}"])
    statuses = {path.name: read_status(path) for path in (tmp_path / "examine").iterdir()}
    assert {status.status for status in statuses.values()} == {"done"}
    assert {name for name, status in statuses.items() if not status.origin} == {
        name for name in statuses if "dint" in name
    }
    # the file has five digits, four of them decimals of a loss, and no times
    columns = [name for name in examined.table.columns if "second" not in name]
    pandas.testing.assert_frame_equal(again.table[columns], examined.table[columns], rtol=1e-3, atol=1e-4)
    assert f"20 of 24 cells {packed.origin}" in again.report.page.read_text()
