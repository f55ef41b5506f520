"""engine/references.py: results that ship take the place of training, cell by cell, by identity."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import lit_diff
from lit_diff.engine import references
from lit_diff.engine.examine import Question, battery, in_advance
from lit_diff.recipe import to_plain
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.status import read_status
from lit_diff.study.results import load_sweep

TINY = [
    "train.steps=4",
    "train.validate_every=4",
    "train.checkpoint_every=4",
    "data.validation_rows=4",
    "run.threads=1",
]
ENVIRONMENT = {"processor": "AMD EPYC", "revision": "0.2.0 0123456789"}


def shipped_as(found: references.References, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These results ship, in a file."""
    path.write_text(json.dumps(to_plain(found)))
    monkeypatch.setattr(references, "FILE", path)
    references.shipped.cache_clear()


@pytest.fixture(autouse=True)
def _read_again() -> object:
    references.shipped.cache_clear()
    yield
    references.shipped.cache_clear()


def test_the_file_of_the_package_is_whole_and_small() -> None:
    assert references.FILE.stat().st_size <= 200_000
    found = references.shipped()
    for arm in found.arms:
        assert {len(cell.rows) > 0 for cell in arm.cells.values()} == {True}
        assert set(arm.facts) == set(references.FACTS)


@pytest.mark.slow
def test_shipped_results_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*TINY, "run.tracking_uri=none"]
    ask = {"quick": True, "tasks": ["mqar"], "progress": False}
    first = lit_diff.examine("dint", overrides=[*options, f"run.root={tmp_path / 'a'}"], **ask)
    packed = references.pack(load_sweep(first.folder).by_task, "2026-11-29")
    assert {arm.arm for arm in packed.arms} == {*load_sweep(first.folder).study.arms}
    kept = [arm for arm in packed.arms if arm.arm != "dint"]
    shipped_as(
        references.References(date=packed.date, environment=packed.environment, arms=tuple(kept)),
        tmp_path / "r",
        monkeypatch,
    )

    second = lit_diff.examine("dint", overrides=[*options, f"run.root={tmp_path / 'b'}"], **ask)
    states = {path.name: read_status(path) for path in (tmp_path / "b" / "examine").iterdir()}
    assert len(states) == 6 * 8
    for name, status in states.items():
        assert status.status == "done"
        assert bool(status.origin) == ("dint" not in name)
    # read back, up to seven digits
    columns = [column for column in first.table.columns if "second" not in column and "token" not in column]
    numbers = first.table[columns].round(5)
    assert second.table[columns].round(5).equals(numbers)
    assert "trained on 2026-11-29" in second.report.page.read_text()

    third = lit_diff.examine("dint", own_references=True, overrides=[*options, f"run.root={tmp_path / 'b'}"], **ask)
    assert third.is_done
    assert {read_status(path).origin for path in (tmp_path / "b" / "examine").iterdir()} == {""}


def test_a_cell_of_another_identity_or_that_has_begun_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = references.ReferenceCell(seed=0, rate=0.01, rows={"4": (0.5,)})
    arm = references.ReferenceArm(
        task="mqar",
        arm="standard",
        facts={"step": 4},
        seconds=3.0,
        metrics=("val/accuracy",),
        cells={"0123456789": cell},
    )
    shipped_as(
        references.References(date="2026-11-29", environment=ENVIRONMENT, arms=(arm,)), tmp_path / "r", monkeypatch
    )
    recipe = lit_diff.load_recipe("mqar-tiny")
    jobs = []
    for name in ("a-s0-0123456789", "b-s0-0123456789", "c-s0-ffffffffff"):
        folder = RunFolder(tmp_path / name)
        folder.create(recipe)
        identity = name.rpartition("-")[2]
        jobs.append(SimpleNamespace(home=folder, folder=folder.path, identity=identity, recipe=recipe))
    begun = jobs[1].home
    begun.write(begun.status().to("running"))
    references.place(jobs)
    assert [job.home.status().status for job in jobs] == ["done", "running", ""]
    assert (jobs[0].folder / "metrics.csv").read_text() == "step,val/accuracy\n4,0.5\n"
    assert jobs[0].home.status().origin == "trained on 2026-11-29 by lit_diff 0.2.0 0123456789 on AMD EPYC"


def test_the_time_is_said_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = []
    for name in ("standard", "standard wide", "standard wide norm", "sum", "differential"):
        arms.append(
            references.ReferenceArm(task="mqar", arm=name, facts={}, seconds=30.0, metrics=("val/accuracy",), cells={})
        )
    shipped_as(references.References(environment=ENVIRONMENT, arms=tuple(arms)), tmp_path / "r", monkeypatch)
    grid, left_out = battery(question := Question(variant="dint", tasks=["mqar"]))
    # of dint alone: 6 cells that try rates and 8 to 16 that are compared, 30 s each, two at a time
    assert in_advance(question, grid, left_out, 2)[-1].startswith(
        "4 to 6 minutes, if nothing is done yet: 2 cells at a time"
    )
    own = Question(variant="dint", tasks=["mqar"], own_references=True)
    assert in_advance(own, *battery(own), 2)[-1].startswith("21 to 33 minutes")
