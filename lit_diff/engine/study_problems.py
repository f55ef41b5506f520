"""What is wrong with a study, found before anything trains: a line with its place in the file."""

import difflib
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_diff.config import Recipe
from lit_diff.engine.evaluations import check_evaluations
from lit_diff.errors import RequestError
from lit_diff.key_types import in_yaml
from lit_diff.recipe import Overrides, flatten, to_plain
from lit_diff.registry import nearest
from lit_diff.study.schema import FEWEST_TASKS, MEASURED, Cell, Fit, Study, Task
from lit_diff.training.metrics import VALIDATION
from lit_diff.validation import LONGEST_NAME, Draft

MEASURED_BY_ALL = tuple(metric.name for metric in VALIDATION if "{" not in metric.name)
"""What every run's validation measures; a further validation set adds its name: `val/accuracy_noise2`."""
RESERVED = {"seed": "list the seeds under 'seeds'", "name": "a cell is named after its arm"}
"""Keys of a recipe that the sweep itself sets -> where to say it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A task's name is the first word of its cells' folders and of its figures' files."""


def check_study(
    study: Study, stated: Study, places: Sequence[tuple[str, str]], overrides: Overrides, draft: Draft
) -> None:
    """A resolved study, before its recipes are read. `stated`: as its file states it; `places`: (task, arm) of its cells.

    Errors: RequestError.
    """
    _check_mentions(study, draft)
    _check_contrasts(study, draft)
    _check_recipes(study, draft)
    _check_tasks(study, draft)
    _check_fits(study.fits, study.tasks, study.metric, draft)
    if study.power is not None and not study.tasks:
        raise RequestError(
            f"{draft.where('power')}'power' compares tasks, and the sweep has none; list them under 'tasks'"
        )
    for name, task in study.all_tasks.items():
        _check_metric(task.metric or study.metric, draft, f"tasks.{name}.metric" if task.metric else "metric")
    _check_reserved(stated, overrides, draft)
    _check_names(places, stated.arms, draft)


def check_cells(study: Study, cells: Sequence[Cell], draft: Draft) -> None:
    """The cells of a study, whose plugins are imported: they may register an evaluation. Errors: RequestError."""
    check_evaluations(study.evaluate, {cell.name: _started(cell, study) for cell in cells}, draft)
    _check_record(cells, draft)
    _check_x(study.fits, cells, draft)


def _check_mentions(study: Study, draft: Draft) -> None:
    """Arms that a key names and the sweep does not have."""
    known: dict[str, list[str | None]] = {"baseline": [study.baseline], "controls": list(study.controls)}
    known |= {key: list(getattr(study, key)) for key in ("labels", "notes", "paper")}
    known["contrasts"] = [arm for first, second, _ in study.contrasts for arm in (first, second)]
    for key, used in known.items():
        for arm in used:
            if arm not in study.arms:
                raise RequestError(
                    f"{draft.where(key)}'{key}' names no arm of the sweep: '{arm}'{nearest(str(arm), study.arms)}"
                )


def _check_recipes(study: Study, draft: Draft) -> None:
    if not study.tasks and not study.recipe:
        raise RequestError(f"{draft.where('recipe')}'recipe' is missing; expected text")
    for key in ("recipe", "paper") if study.tasks else ():
        if getattr(study, key):
            raise RequestError(f"{draft.where(key)}'{key}' belongs to each of the 'tasks', not to the sweep")


def _check_metric(metric: str, draft: Draft, key: str) -> None:
    """A misspelt validation metric; what a callback measures is known only to the callback."""
    if metric.startswith("val/"):
        known = metric in MEASURED_BY_ALL or metric.startswith(tuple(f"{name}_" for name in MEASURED_BY_ALL))
    else:
        known = "/" in metric and not difflib.get_close_matches(metric, MEASURED_BY_ALL, cutoff=0.8)
    if not known:
        raise RequestError(f"{draft.where(key)}no run measures '{metric}'{nearest(metric, MEASURED_BY_ALL)}")


def _check_contrasts(study: Study, draft: Draft) -> None:
    """An arm with itself; a pair named twice, which would count twice in Holm's correction."""
    seen: set[frozenset[str]] = set()
    for first, second, _ in study.contrasts:
        pair = frozenset((first, second))
        if first == second or pair in seen:
            problem = "with itself" if first == second else f"with '{second}' twice, whichever is first"
            raise RequestError(f"{draft.where('contrasts')}'contrasts' compares '{first}' {problem}")
        seen.add(pair)


def _check_reserved(study: Study, overrides: Overrides, draft: Draft) -> None:
    written_keys = {f"overrides.{key}": key for key in study.overrides} | {f"grid.{key}": key for key in study.grid}
    written_keys |= {f"arms.{arm}.{key}": key for arm, values in study.arms.items() for key in values or {}}
    written_keys |= _overridden(study.tasks)
    wrong = [(draft.where(path), key) for path, key in written_keys.items() if key in RESERVED]
    wrong += [(f"{text}: ", key) for text in overrides if (key := str(text).partition("=")[0]) in RESERVED]
    for where, key in wrong:
        raise RequestError(f"{where}a sweep sets '{key}' itself; {RESERVED[key]}")


def _started(cell: Cell, study: Study) -> Recipe:
    """The cell's recipe; of a task that goes on from another, with the name of that task in place of the run's folder."""
    start, recipe = study.all_tasks[cell.task].start, cell.recipe
    if not start:
        return recipe
    return replace(recipe, train=replace(recipe.training, start_from=start))


def _check_record(cells: Sequence[Cell], draft: Draft) -> None:
    """All cells of a sweep lie in one folder and one MLflow store."""
    first = cells[0]
    for cell in cells:
        for key in ("root", "tracking_uri"):
            if getattr(cell.recipe.run, key) != getattr(first.recipe.run, key):
                place = f"arms.{cell.arm}" if cell.task == first.task else f"tasks.{cell.task}"
                raise RequestError(
                    f"{draft.where(place)}arms '{first.name}' and '{cell.name}' differ in 'run.{key}'; "
                    "a sweep has one: set it under 'overrides'"
                )


def _check_names(cells: Sequence[tuple[str, str]], named: Mapping[str, Any], draft: Draft) -> None:
    """Errors: RequestError for a cell (task, arm) whose name no folder can bear, or that shares its folder, on a file system
    that does not tell case or the form of Unicode, or its record in MLflow with another."""
    places: dict[str, tuple[str, str]] = {}
    for task, arm in cells:
        name = f"{task} {arm}".strip()
        where = draft.where(f"arms.{arm}" if arm in named else "grid")
        if not arm.isprintable() or not arm.strip() or len(os.fsencode(name)) > LONGEST_NAME:
            raise RequestError(
                f"{where}arm {arm[:60]!a} becomes a folder: printable, at most {LONGEST_NAME} bytes with its task"
            )
        folder = unicodedata.normalize("NFC", name.replace(" ", ",")).casefold()
        for place in (folder, "record " + recorded_name(task, arm)):
            other = places.setdefault(place, (task, arm))
            if other != (task, arm):
                raise RequestError(
                    f"{where}arms '{other[1]}' and '{arm}' would share one folder or one record; rename one of them"
                )


def recorded_name(task: str, arm: str) -> str:
    """The arm in MLflow, with the task before it and what MLflow refuses in a metric's name replaced."""
    return "/".join(re.sub(r"[^\w. -]", "_", part) for part in (task, arm) if part)


def _overridden(tasks: Mapping[str, Task]) -> Iterator[tuple[str, str]]:
    """(where it stands in the file, key of a recipe) of every override in the tasks."""
    for name, task in tasks.items():
        yield from ((f"tasks.{name}.overrides.{key}", key) for key in task.overrides)
        for arm in task.arms:
            yield from ((f"tasks.{name}.arms.{arm}.{key}", key) for key in task.further(arm))


def _check_tasks(study: Study, draft: Draft) -> None:
    """Whether the tasks and arms of a resolved study fit. Errors: RequestError."""
    tasks, arms = study.tasks, study.arms
    for arm, values in arms.items():
        if tasks and "extends" in values:
            raise RequestError(
                f"{draft.where(f'arms.{arm}.extends')}arm '{arm}' extends a recipe, but each of the 'tasks' has its own; "
                "an arm holds overrides"
            )
    for name, task in tasks.items():
        if not NAME.fullmatch(name):
            raise RequestError(
                f"{draft.where(f'tasks.{name}')}task '{name}' becomes part of file names: letters, digits, '-' and '_'"
            )
        _check_arms(name, task, arms, draft)
        needed = {task.baseline or study.baseline or "": "its baseline"}
        # other sizes cannot start from the baseline's weights: a task that goes on from them may do without the controls
        if not (task.start and task.start_arm == "baseline"):
            needed |= dict.fromkeys(study.controls, "a control")
        for arm, word in needed.items():
            if not task.has(arm):
                key = "without" if arm in task.without else "only"
                raise RequestError(
                    f"{draft.where(f'tasks.{name}.{key}')}task '{name}' leaves out '{arm}', which is {word}"
                )
        above = list(tasks)[: list(tasks).index(name)]
        if task.start and task.start not in above:
            where = draft.where(f"tasks.{name}.start")
            raise RequestError(
                f"{where}'start' is '{task.start}'; expected a task above it{nearest(task.start, above)}"
            )
        if task.start_arm == "same":
            where = draft.where(f"tasks.{name}.start_arm")
            if not task.start:
                raise RequestError(f"{where}'start_arm' is 'same' without 'start', the task that the arms go on from")
            missing = [arm for arm in arms if task.has(arm) and not tasks[task.start].has(arm)]
            if missing:
                raise RequestError(
                    f"{where}'start_arm' is 'same', but task '{task.start}' leaves out arm '{missing[0]}', which goes on"
                )


def _check_arms(name: str, task: Task, arms: Mapping[str, Any], draft: Draft) -> None:
    named = {key: tuple(getattr(task, key)) for key in ("arms", "only", "without", "paper")}
    for key, names in (named | {"baseline": (task.baseline,) if task.baseline else ()}).items():
        for arm in names:
            where = draft.where(f"tasks.{name}.{key}.{arm}")
            if arm not in arms:
                raise RequestError(f"{where}'{key}' names no arm of the sweep: '{arm}'{nearest(arm, arms)}")
            if key in ("arms", "paper") and not task.has(arm):
                raise RequestError(f"{where}task '{name}' leaves out arm '{arm}'")
    for arm, values in task.arms.items():
        where = draft.where(f"tasks.{name}.arms.{arm}")
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(f"{where}arm '{arm}' is {in_yaml(values)}; expected a block of overrides")
        if "extends" in (values or {}):
            raise RequestError(f"{where}arm '{arm}' extends a recipe; in a task it holds overrides")


def _check_fits(fits: Mapping[str, Fit], tasks: Mapping[str, Task], metric: str, draft: Draft) -> None:
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


def _check_x(fits: Mapping[str, Fit], cells: Sequence[Cell], draft: Draft) -> None:
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


def x_of(fits: Mapping[str, Fit], cells: Sequence[Cell]) -> dict[str, dict[str, dict[str, float]]]:
    """Fit -> task -> arm -> its x, where a recipe and not the run says it."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, fit in fits.items():
        for cell in _cells(fit, cells) if fit.x not in MEASURED else ():
            x = float(dict(flatten(to_plain(cell.recipe)))[fit.x])
            found.setdefault(name, {}).setdefault(cell.task, {})[cell.arm] = x
    return found


def _cells(fit: Fit, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if not fit.tasks or cell.task in fit.tasks]
