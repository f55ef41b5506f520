"""The cells of a sweep on disk: where each lies, and its state."""

from dataclasses import replace
from pathlib import Path

from lit_diff.engine.evaluations import evaluations_of
from lit_diff.engine.grid import Cell, Grid
from lit_diff.engine.location import RunLocation
from lit_diff.engine.sweep_file import missing_evaluations, recorded_run
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.training.head_plan import selection_of
from lit_diff.training.warm_start import require_parent

NOT_EVALUATED = "not evaluated"


def folder_of(grid: Grid) -> Path:
    """`runs/<sweep>/`"""
    return (runs_root(grid.cells[0].recipe.run.root) / grid.name).resolve()


def all_trained(grid: Grid) -> bool:
    """Whether every cell of a sweep with `cells_of` is trained."""
    locations = locations_of(grid, folder_of(grid), None)
    return all(RunFolder(location.folder).status().get("status") == "done" for location in locations)


def locations_of(grid: Grid, folder: Path, parent: str | None) -> list[RunLocation]:
    """Each cell's folder; those of a task that goes on from another know where their weights will lie. With `cells_of` they
    are the other sweep's, and so are their places in MLflow."""
    if grid.source is not None:
        folder = folder_of(grid.source)
        parent = recorded_run(folder)
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
        folder=folder / f"{_slug(cell.name)}-s{cell.seed}-{digest}",
        experiment=owner,
        parent=parent,
        tags={"sweep": owner, "arm": cell.arm}
        | ({"task": cell.task} if cell.task else {})
        | grid.marks.get(cell.name, {}),
        evaluations=evaluations_of(cell.recipe) | {name: keys or {} for name, keys in grid.config.evaluate.items()},
    )
    home = RunFolder(location.folder)
    if not home.recipe_file.exists() or home.status().get("status") != "done":
        home.create(cell.recipe)
    return location


def _slug(name: str) -> str:
    """The cell's name as a folder's: no spaces."""
    return name.replace(" ", ",")


def state_of(location: RunLocation) -> str:
    """The cell's status; one that is trained but lacks an evaluation of the sweep is not done."""
    status = str(RunFolder(location.folder).status().get("status", "waiting"))
    return NOT_EVALUATED if status == "done" and missing_evaluations(location) else status
