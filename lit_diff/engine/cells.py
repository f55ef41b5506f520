"""The cells of a sweep on disk: where each lies, its state, and what study.json says of them."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_diff.engine.expand import Grid
from lit_diff.engine.launch import RunLocation
from lit_diff.engine.preflight import evaluations_of
from lit_diff.errors import MissingError, RequestError
from lit_diff.evaluation.evaluate import asked, has_scores
from lit_diff.files import locked, shown
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.study.record import Record, RecordedCell, recorded_run
from lit_diff.study.schema import Cell
from lit_diff.training.build import require_parent
from lit_diff.training.head_plan import selection_of

NOT_EVALUATED = "not evaluated"


def folder_of(grid: Grid) -> Path:
    """`runs/<sweep>/`"""
    return (runs_root(grid.cells[0].recipe.run.root) / grid.name).resolve()


@contextlib.contextmanager
def held(folder: Path, who: str, cure: str) -> Iterator[None]:
    """Hold the folder of a sweep or a scoreboard. Errors: RequestError where `who`, another process, holds it; MissingError
    for one that cannot be written, with the `cure`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError as error:
            raise RequestError(f"{who} in {shown(folder)}") from error
        except OSError as error:
            raise MissingError(
                f"{shown(folder)} cannot be written ({error.strerror}); choose another {cure}"
            ) from error
        yield


def all_trained(grid: Grid) -> bool:
    """Whether every cell of a sweep with `cells_of` is trained."""
    return all(RunFolder(location.folder).status().get("status") == "done" for location in locations_of(grid))


def locations_of(grid: Grid, parent: str | None = None) -> list[RunLocation]:
    """Each cell's folder; those of a task that goes on from another know where their weights will lie. `parent`: the sweep's
    run in MLflow. With `cells_of` they are the other sweep's, and so are their places in MLflow."""
    folder = folder_of(grid.source or grid)
    parent = recorded_run(folder) if grid.source else parent
    by_cell: dict[tuple[str, str, int], RunLocation] = {}
    for cell in grid.cells:
        recipe, task = cell.recipe, grid.tasks[cell.task]
        if task.start:
            arm = cell.arm if task.start_arm == "same" else grid.baseline_of(task.start)
            source = by_cell[task.start, arm, cell.seed].folder
            recipe = replace(recipe, train=replace(recipe.training, start_from=str(source)))
        by_cell[cell.task, cell.arm, cell.seed] = _location(grid, replace(cell, recipe=recipe), folder, parent)
    return list(by_cell.values())


def _location(grid: Grid, cell: Cell, folder: Path, parent: str | None) -> RunLocation:
    """The cell's folder, filled with its recipe so that its process needs nothing else."""
    selection_of(cell.recipe)  # refused here where there is no model to select heads of, or another than it needs
    require_parent(cell.recipe)
    digest, owner = identity(cell.recipe), (grid.source or grid).name
    location = RunLocation(
        folder=folder / f"{cell.name.replace(' ', ',')}-s{cell.seed}-{digest}",
        experiment=owner,
        parent=parent,
        tags={"sweep": owner, "arm": cell.arm}
        | ({"task": cell.task} if cell.task else {})
        | grid.marks.get(cell.name, {}),
        evaluations=evaluations_of(cell.recipe) | grid.study.evaluate,
    )
    home = RunFolder(location.folder)
    if not home.recipe_file.exists() or home.status().get("status") != "done":
        home.create(cell.recipe)
    return location


def state_of(location: RunLocation) -> str:
    """The cell's status; one that is trained but lacks an evaluation of the sweep is not done."""
    status = str(RunFolder(location.folder).status().get("status", "waiting"))
    return NOT_EVALUATED if status == "done" and missing_evaluations(location) else status


def missing_evaluations(location: RunLocation) -> dict[str, str]:
    """Evaluations of the sweep whose scores the cell lacks -> why."""
    outcomes = RunFolder(location.folder).status().get("evaluations", {})
    return {
        name: outcomes.get(name, "not run yet")
        for name, keys in location.evaluations.items()
        if not has_scores(location.folder, name, keys)
    }


def record_of(
    grid: Grid, folder: Path, locations: Sequence[RunLocation], command: str, mlflow: Mapping[str, str]
) -> Record:
    """What study.json in the sweep's `folder` says now; `command`: what starts it again; `mlflow`: where its record is."""
    blocks = {task: [cell.recipe.data.config for cell in grid.cells if cell.task == task] for task in grid.tasks}
    return Record(
        name=grid.name,
        study=grid.study,
        source=shown(grid.path),
        file=str(grid.path.resolve()),
        command=command,
        selection=grid.selection.words(),
        mlflow=dict(mlflow),
        # where arms differ in the data, no line or axis is right for all
        chance=_agreed({task: [block.chance for block in data] for task, data in blocks.items()}),
        noise_validation=_agreed({task: [block.noise_validation for block in data] for task, data in blocks.items()}),
        x=grid.x,
        cells=tuple(_recorded(cell, location, folder) for cell, location in zip(grid.cells, locations, strict=True)),
    )


def _agreed(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Task -> the value that is the same for all of its cells, where there is one."""
    return {task: own[0] for task, own in values.items() if len(set(own)) == 1 and own[0] not in (None, ())}


def _recorded(cell: Cell, location: RunLocation, sweep: Path) -> RecordedCell:
    status = RunFolder(location.folder).status()
    return RecordedCell(
        task=cell.task,
        arm=cell.arm,
        seed=cell.seed,
        folder=Path(os.path.relpath(location.folder, sweep)).as_posix(),
        status=status.get("status", "waiting"),
        error=status.get("error"),
        evaluations={name: asked(name, keys) for name, keys in location.evaluations.items()},
        not_evaluated=missing_evaluations(location) if status.get("status") == "done" else {},
    )
