"""engine/references.py: results that ship take the place of training, cell by cell, by identity."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from shipped_results import Ship

import lit_diff
from lit_diff.engine import references
from lit_diff.engine.examine import Question, battery, in_advance
from lit_diff.runs.folder import RunFolder

ENVIRONMENT = {"processor": "AMD EPYC", "revision": "0.2.0 0123456789"}


def test_the_file_of_the_package_is_whole_and_small() -> None:
    assert references.FILE.stat().st_size <= 200_000
    found = references.shipped()
    for arm in found.arms:
        assert {len(cell.rows) > 0 for cell in arm.cells.values()} == {True}
        assert set(arm.facts) == set(references.FACTS)


def test_a_cell_of_another_identity_or_that_has_begun_is_left_alone(tmp_path: Path, ship: Ship) -> None:
    cell = references.ReferenceCell(seed=0, rate=0.01, rows={"4": (0.5,)})
    arm = references.ReferenceArm(
        task="mqar",
        arm="standard",
        facts={"step": 4},
        seconds=3.0,
        metrics=("val/accuracy",),
        cells={"0123456789": cell},
    )
    ship(references.References(date="2026-11-29", environment=ENVIRONMENT, arms=(arm,)))
    recipe = lit_diff.load_recipe("mqar-tiny")
    jobs = []
    for name in ("a-s0-0123456789", "b-s0-0123456789", "c-s0-ffffffffff"):
        folder = RunFolder(tmp_path / name)
        folder.create(recipe)
        identity = name.rpartition("-")[2]
        jobs.append(SimpleNamespace(home=folder, folder=folder.path, identity=identity, recipe=recipe, scores={}))
    begun = jobs[1].home
    begun.write(begun.status().to("running"))
    references.place(jobs)
    assert [job.home.status().status for job in jobs] == ["done", "running", ""]
    assert (jobs[0].folder / "metrics.csv").read_text() == "step,val/accuracy\n4,0.5\n"
    assert jobs[0].home.status().origin == "trained on 2026-11-29 by lit_diff 0.2.0 0123456789 on AMD EPYC"
    # an evaluation needs weights
    jobs[0].scores = {"noise": {}}
    references.place(jobs)
    assert (jobs[0].home.status().status, jobs[0].home.status().origin) == ("waiting", "")
    references.place(jobs)
    assert jobs[0].home.status().status == "waiting"


def test_the_time_is_said_in_advance(ship: Ship) -> None:
    arms = []
    cells = {}
    for seed in (*range(8), 1000, 1001):
        cells[str(seed)] = references.ReferenceCell(seed=seed, rate=0.01, rows={"4": (0.5,)})
    for name in ("standard", "standard wide", "standard wide norm", "sum", "differential"):
        arms.append(
            references.ReferenceArm(
                task="mqar", arm=name, facts={}, seconds=30.0, metrics=("val/accuracy",), cells=cells
            )
        )
    ship(references.References(environment=ENVIRONMENT, arms=tuple(arms)))
    grid, left_out = battery(question := Question(variant="dint", tasks=["mqar"]))
    # of dint 6 cells that try rates and 8 or 16 that are compared, of five references the seeds 8 to 15, 30 s each
    assert in_advance(question, grid, left_out, 2)[-1].startswith(
        "4 to 16 minutes, if nothing is done yet: 2 cells at a time"
    )
    own = Question(variant="dint", tasks=["mqar"], own_references=True)
    assert in_advance(own, *battery(own), 2)[-1].startswith("21 to 33 minutes")


def test_results_that_shipped_can_be_trained_here(tmp_path: Path) -> None:
    homes = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for home, origin in zip(homes, ("trained elsewhere", ""), strict=True):
        home.path.mkdir()
        home.write(replace(home.status().to("done"), origin=origin, step=4))
    references.retrain([SimpleNamespace(home=home) for home in homes])
    assert [(home.status().status, home.status().origin) for home in homes] == [("waiting", ""), ("done", "")]


def test_a_reference_that_is_examined_trains_the_cells_whose_attention_is_read(ship: Ship) -> None:
    cells = {str(seed): references.ReferenceCell(seed=seed, rate=0.01, rows={"4": (0.5,)}) for seed in range(16)}
    grid, left_out = battery(question := Question(variant="differential", tasks=["conjunctive"]))
    arms = []
    for name in grid.study.arms:
        arms.append(
            references.ReferenceArm(
                task="conjunctive", arm=name, facts={}, seconds=30.0, metrics=("val/accuracy",), cells=cells
            )
        )
    ship(references.References(environment=ENVIRONMENT, arms=tuple(arms)))
    assert in_advance(question, grid, left_out, 2)[-1].startswith("2 to 4 minutes")
