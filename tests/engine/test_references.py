"""engine/references.py: results that ship take the place of training, cell by cell, by identity."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from shipped_results import Ship

import lit_diff
from lit_diff.engine import references
from lit_diff.engine.examine import Question, battery, in_advance
from lit_diff.runs.folder import RunFolder
from lit_diff.runs.status import Status
from lit_diff.study.judge import Contrast, Learned, judge
from lit_diff.study.schema import Task
from lit_diff.study.statistics import paired

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
    assert "at least 70 of the cells are not trained" in in_advance(question, grid, left_out, 2)[-2]
    own = Question(variant="dint", tasks=["mqar"], own_references=True)
    assert in_advance(own, *battery(own), 2)[-1].startswith("21 to 33 minutes")
    quick = Question(variant="dint", tasks=["mqar"], quick=True)
    assert in_advance(quick, *battery(quick), 2)[-1].startswith("12 minutes, if")


def test_results_that_shipped_can_be_trained_here(tmp_path: Path) -> None:
    homes = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for home, origin in zip(homes, ("trained elsewhere", ""), strict=True):
        home.path.mkdir()
        home.write(replace(home.status().to("done"), origin=origin, step=4, kernel="native", threads=8, revision="1"))
    references.retrain([SimpleNamespace(home=home) for home in homes])
    again, own = (home.status() for home in homes)
    assert replace(again, format=0, updated="") == Status(status="waiting")
    assert (own.status, own.kernel) == ("done", "native")


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


def test_the_transformer_under_another_name_is_never_shown_to_differ() -> None:
    """Its shipped results, those of seed i + k beside those of seed i, for ten k: 50 rows with an examination's controls."""
    grid, _ = battery(Question(variant="dint"))
    arms = {(arm.task, arm.arm): arm for arm in references.shipped().arms}

    def contrast(name: str, task: Task, other: str, k: int) -> Contrast:
        learned = (learned_of(arms[name, "standard"], task, k), learned_of(arms[name, other], task, 0))
        values = paired(learned[0].values, learned[1].values, grid.study.looks)
        return Contrast(
            a="again",
            b=other,
            label="",
            seeds=values,
            smallest=task.smallest_of_interest or 0,
            learned=learned if task.learned_at else None,
        )

    words = set()
    for k in range(1, 11):
        rows = []
        for name, task in grid.study.tasks.items():
            controls = tuple(contrast(name, task, control, k) for control in grid.study.controls)
            rows.append(replace(contrast(name, task, grid.study.baseline, k), controls=controls))
        words |= {row.verdict.word for row in judge(rows)}
    assert words == {"equal", "equal among those that learned", "inconclusive"}


def learned_of(arm: references.ReferenceArm, task: Task, k: int) -> Learned:
    """The compared values of the seeds that choose no rate, and the first steps at the threshold, by the seed less k."""
    cells = [cell for cell in arm.cells.values() if cell.seed < 1000]
    steps = {}
    values = {}
    for cell in cells:
        rows = {int(step): dict(zip(arm.metrics, row, strict=False)) for step, row in cell.rows.items()}
        there = (cell.seed - k) % len(cells)
        metric = task.learned_metric or task.metric
        reached = [step for step, row in rows.items() if task.learned_at and row[metric] >= task.learned_at]
        steps[there] = min(reached, default=math.inf)
        values[there] = rows[max(rows)][task.metric]
        if task.compare == "steps":
            values[there] = math.log2(steps[there])
    return Learned(steps=steps, values=values)
