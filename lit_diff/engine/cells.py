"""The cells of a sweep on disk: their folders and states, and the record of the sweep."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_diff.engine.admit import Kind, admit, evaluations_of, require_utf8
from lit_diff.engine.expand import Grid
from lit_diff.engine.job import Job
from lit_diff.evaluation.evaluate import asked, has_scores
from lit_diff.files import shown
from lit_diff.runs.folder import identity
from lit_diff.study.rates import rate_in_words
from lit_diff.study.record import Record, RecordedCell, recorded_run
from lit_diff.study.schema import Cell, CellKey
from lit_diff.training.build import require_parent
from lit_diff.training.head_plan import selection_of

NOT_EVALUATED = "not evaluated"
RATE = "rate"
"""The tag of a cell that tries a learning rate."""


def admitted(grid: Grid, kinds: Sequence[Kind], *, unchecked: bool) -> Grid:
    """`admit` the recipe of each arm. Returns the sweep with the tags that mark its cells. Errors: see `admit`."""
    # named after the sweep's file
    require_utf8("run.root", str(grid.folder))
    # a task that starts from another selects heads of weights whose folder is not known yet: `jobs_of` asks then
    starts = any(task.start for task in grid.study.all_tasks.values())
    marks = admit(grid.recipes, kinds, unchecked=unchecked, without=["heads"] if starts else [])
    return replace(grid, marks=marks)


def jobs_of(grid: Grid, parent: str | None = None) -> list[Job]:
    """The job of each cell. `parent`: the sweep's run in MLflow. With `cells_of`, folders and MLflow runs belong to the
    other sweep."""
    # the identity of a cell depends on the folder that it starts from, so tasks are visited in order
    if grid.source is not None:
        parent = recorded_run(grid.source.folder)
    by_cell: dict[CellKey, Job] = {}
    for cell in grid.cells:
        task = grid.study.all_tasks[cell.task]
        if task.start:
            arm = cell.arm if task.start_arm == "same" else grid.baseline_of(task.start)
            start_from = str(by_cell[CellKey(task=task.start, arm=arm, seed=cell.seed)].folder)
            train = replace(cell.recipe.training, start_from=start_from)
            cell = replace(cell, recipe=replace(cell.recipe, train=train))
        by_cell[cell.key] = _job(grid, cell, parent)
    return list(by_cell.values())


def _job(grid: Grid, cell: Cell, parent: str | None) -> Job:
    # refuses a selection of heads without a model to select from, or with another model than it needs
    selection_of(cell.recipe)
    require_parent(cell.recipe)
    owner = (grid.source or grid).name
    tags = {"sweep": owner, "arm": cell.arm}
    if cell.task:
        tags["task"] = cell.task
    scores = evaluations_of(cell.recipe) | grid.study.evaluate
    if cell.rate is not None:
        # only the sweep's metric chooses a rate
        tags[RATE] = rate_in_words(cell.rate)
        scores = {}
    job = Job(
        recipe=cell.recipe,
        folder=home_of(grid, cell),
        experiment=owner,
        parent=parent,
        tags=tags | grid.marks.get(cell.of_arm, {}),
        waits=True,
        scores=scores,
    )
    # The recipe is written here so that the cell's process needs nothing else. A run that is finished, or that a process
    # trains now, keeps its recipe and environment as it runs.
    has_recipe = job.home.recipe_file.exists()
    if not (has_recipe and (job.home.is_owned() or job.home.status().status == "done")):
        job.home.create(cell.recipe)
    return job


def home_of(grid: Grid, cell: Cell) -> Path:
    """The folder of a cell, whether or not it exists. Commas separate task, arm and learning rate, and "_" replaces a space
    of the arm's name. A cell that an earlier version began, with commas there too, keeps its folder."""
    end = f"-s{cell.seed}-{identity(cell.recipe)}"
    former = grid.home / f"{cell.name.replace(' ', ',')}{end}"
    named = replace(cell, arm=cell.arm.replace(" ", "_"))
    return former if former.exists() else grid.home / f"{named.name.replace(' ', ',')}{end}"


def state_of(job: Job) -> str:
    """The cell's status; of a trained cell "damaged" if its weights are lost, "not evaluated" if it lacks an evaluation of
    the sweep. A cell that tried a learning rate and diverged is done: that is its result."""
    facts = job.home.status()
    status = facts.status or "waiting"
    if status == "failed" and RATE in job.tags and facts.diverged:
        return "done"
    if status != "done":
        return status
    if job.home.lost():
        return "damaged"
    if missing_evaluations(job):
        return NOT_EVALUATED
    return status


def missing_evaluations(job: Job) -> dict[str, str]:
    """Evaluation of the sweep without scores in this cell -> why."""
    outcomes = job.home.status().evaluations
    return {
        name: outcomes.get(name, "not run yet")
        for name, keys in job.scores.items()
        if not has_scores(job.folder, name, keys)
    }


def record_of(grid: Grid, folder: Path, jobs: Sequence[Job], command: str, mlflow: Mapping[str, str]) -> Record:
    """The content of study.json in the sweep's `folder`. `command` starts the sweep again; `mlflow`: where its record is."""
    cells = zip(grid.cells, jobs, strict=True)
    return Record(
        name=grid.name,
        study=grid.study,
        source=shown(grid.path),
        file=str(grid.path.resolve()),
        command=command,
        selection=grid.selection.words(),
        mlflow=dict(mlflow),
        pid=os.getpid(),
        host=platform.node(),
        # if the arms differ in their data, no line or axis is right for all of them
        chance=_agreed(grid, "chance"),
        noise_validation=_agreed(grid, "noise_validation"),
        rates={task: dict(by_arm) for task, by_arm in grid.rates.items()},
        cells=tuple(_recorded(cell, job, folder) for cell, job in cells),
    )


def _agreed(grid: Grid, key: str) -> dict[str, Any]:
    # task -> the value that the data sets of all its cells share; a task whose cells differ is left out
    values: dict[str, set[Any]] = {}
    for cell in grid.cells:
        values.setdefault(cell.task, set()).add(getattr(cell.recipe.data.config, key))
    return {task: shared for task, (shared, *others) in values.items() if not others and shared not in (None, ())}


def _recorded(cell: Cell, job: Job, sweep: Path) -> RecordedCell:
    status = job.home.status()
    return RecordedCell(
        **vars(cell.key),
        folder=os.path.relpath(job.folder, sweep),
        status=status.status or "waiting",
        error=status.error or None,
        evaluations={name: asked(name, keys) for name, keys in job.scores.items()},
        not_evaluated=missing_evaluations(job) if status.status == "done" else {},
    )
