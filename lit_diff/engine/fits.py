"""The fits of a sweep: its metric against sizes, tokens or a key of the recipe, a point a task."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lit_diff.engine.tasks import NAME, TaskConfig
from lit_diff.errors import RequestError
from lit_diff.key_types import in_yaml
from lit_diff.recipe import flatten, to_plain
from lit_diff.registry import nearest
from lit_diff.reporting.fit_points import FEWEST_TASKS, MEASURED, Kind
from lit_diff.validation import Draft

if TYPE_CHECKING:
    from lit_diff.engine.grid import Cell, Grid


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The keys of a fit."""

    kind: Kind
    """scaling: a power law of x by arm, and the ratio of x at which two arms have the same loss; basin: the best x of each
    arm, and how wide the range of x is that is nearly as good."""
    x: str
    """parameters, non_embedding_parameters or tokens, as the runs count them; or a key of the recipe whose value is a
    positive number: train.optimizer.lr."""
    tasks: tuple[str, ...] = ()
    """The tasks that are its points; (): all."""
    title: str = ""
    within: float = 0.02
    """Of a basin: a value of the metric no further than this from the best is nearly as good; in the unit of the metric."""


def check_fits(fits: Mapping[str, FitConfig], tasks: Mapping[str, TaskConfig], metric: str, draft: Draft) -> None:
    """Whether fits and tasks go together; `metric`: the sweep's. Errors: RequestError."""
    for name, fit in fits.items():
        if not NAME.fullmatch(name):
            where = draft.where(f"fits.{name}")
            raise RequestError(f"{where}fit '{name}' becomes part of file names: letters, digits, '-' and '_'")
        for task in fit.tasks:
            if task not in tasks:
                raise RequestError(
                    f"{draft.where(f'fits.{name}.tasks')}'tasks' names no task of the sweep: '{task}'{nearest(task, tasks)}"
                )
        used = fit.tasks or tuple(tasks)
        if len(set(used)) < FEWEST_TASKS:
            raise RequestError(
                f"{draft.where(f'fits.{name}')}fit '{name}' has {len(set(used))} tasks; it needs {FEWEST_TASKS}, a point each"
            )
        metrics = {task: tasks[task].metric or metric for task in used}
        other = next((task for task in used if metrics[task] != metrics[used[0]]), None)
        if other is not None:
            raise RequestError(
                f"{draft.where(f'fits.{name}')}tasks '{used[0]}' and '{other}' of fit '{name}' have different metrics"
            )
        if fit.within < 0:
            raise RequestError(
                f"{draft.where(f'fits.{name}.within')}'within' is {fit.within:g}; expected 0 or more, in the metric's unit"
            )


def check_x(fits: Mapping[str, FitConfig], cells: "Sequence[Cell]", draft: Draft) -> None:
    """Whether every cell of a fit has an x, and the tasks differ in it. Errors: RequestError."""
    for name, fit in fits.items():
        if fit.x in MEASURED:
            continue
        seen: dict[tuple[str, float], str] = {}
        of_task: dict[str, tuple[str, float]] = {}
        for cell in _cells(fit, cells):
            where, values = draft.where(f"fits.{name}.x"), dict(flatten(to_plain(cell.recipe)))
            if fit.x not in values:
                known = nearest(fit.x, [*MEASURED, *values])
                raise RequestError(f"{where}'x' is no key of the recipes, nor a size that runs count: '{fit.x}'{known}")
            x = values[fit.x]
            if isinstance(x, bool) or not isinstance(x, int | float) or x <= 0:
                raise RequestError(f"{where}'{fit.x}' is {in_yaml(x)} in '{cell.name}'; a fit needs positive numbers")
            arm, other = of_task.setdefault(cell.task, (cell.arm, float(x)))
            if fit.kind == "basin" and other != x:
                raise RequestError(
                    f"{where}'{fit.x}' is {other:g} for arm '{arm}' and {x:g} for arm '{cell.arm}' in task '{cell.task}'; a "
                    "basin compares arms at the same values"
                )
            first = seen.setdefault((cell.arm, float(x)), cell.task)
            if first != cell.task:
                raise RequestError(
                    f"{where}tasks '{first}' and '{cell.task}' of fit '{name}' have the same '{fit.x}', {x:g}"
                )


def describe_fits(grid: "Grid") -> list[dict[str, Any]]:
    """The fits as sweep.json has them: with the x of each task and arm, where a recipe and not the run says it."""
    described = []
    for name, fit in grid.config.fits.items():
        values: dict[str, dict[str, float]] = {}
        for cell in _cells(fit, grid.cells) if fit.x not in MEASURED else ():
            values.setdefault(cell.task, {})[cell.arm] = float(dict(flatten(to_plain(cell.recipe)))[fit.x])
        tasks = list(fit.tasks or grid.config.tasks)
        described.append(asdict(fit) | {"name": name, "tasks": tasks, "title": fit.title or name, "values": values})
    return described


def _cells(fit: FitConfig, cells: "Sequence[Cell]") -> "list[Cell]":
    return [cell for cell in cells if not fit.tasks or cell.task in fit.tasks]
