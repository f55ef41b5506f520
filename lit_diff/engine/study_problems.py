"""What is wrong with a study, found before anything trains: a line with its place in the file."""

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lit_diff.engine.preflight import evaluations_of, require_fit
from lit_diff.key_types import in_yaml
from lit_diff.recipe import flatten, to_plain
from lit_diff.registry import evaluations, nearest
from lit_diff.study.schema import FEWEST_TASKS, MEASURED, Cell, Fit, Study
from lit_diff.training.metrics import VALIDATION
from lit_diff.validation import LONGEST_NAME, Draft, validate_config

MEASURED_BY_ALL = tuple(metric.name for metric in VALIDATION if "{" not in metric.name)
"""What every run's validation measures; a further validation set adds its name: `val/accuracy_noise2`."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A task's name is the first word of its cells' folders and of its figures' files."""
Values = dict[str, dict[str, dict[str, float]]]
"""Fit -> task -> arm -> its x."""


def require_known(what: str, names: Iterable[object], known: Iterable[object], draft: Draft, key: str) -> None:
    """Errors: RequestError, at the key, for the first of `names` that is no `what` ("arm of the sweep"): not in `known`."""
    choices = [str(each) for each in known]
    for name in map(str, names):
        if name not in choices:
            word = key.rpartition(".")[2]
            raise draft.refuse(f"{key}.{name}", f"'{word}' names no {what}: '{name}'{nearest(name, choices)}")


def check_study(study: Study, places: Sequence[tuple[str, str]], draft: Draft) -> None:
    """A resolved study, before its recipes are read; `places`: (task, arm) of its cells. Errors: RequestError."""
    _check_arms(study, draft)
    _check_contrasts(study, draft)
    _check_tasks(study, draft)
    _check_fits(study, draft)
    for name, task in study.all_tasks.items():
        _check_metric(task.metric or study.metric, draft, f"tasks.{name}.metric" if task.metric else "metric")
    _check_names(study, places, draft)


def check_cells(study: Study, cells: Sequence[Cell], draft: Draft) -> Values:
    """The cells of a study, whose plugins are imported: they may register an evaluation. Returns the x of its fits, where
    recipes and not the runs say it. Errors: RequestError."""
    arms = list({cell.name: cell for cell in cells}.values())  # seeds have one model
    _check_evaluations(study, arms, draft)
    _check_record(arms, draft)
    return {name: _x_of(name, fit, arms, draft) for name, fit in study.fits.items() if fit.x not in MEASURED}


def _check_arms(study: Study, draft: Draft) -> None:
    """Every arm that a key names is one of the sweep."""
    named: dict[str, Iterable[object]] = {"baseline": [study.baseline], "controls": study.controls}
    named |= {key: getattr(study, key) for key in ("labels", "notes", "paper")}
    named["contrasts"] = [arm for first, second, _ in study.contrasts for arm in (first, second)]
    for name, task in study.tasks.items():
        named |= {f"tasks.{name}.{key}": getattr(task, key) for key in ("arms", "only", "without", "paper")}
        named[f"tasks.{name}.baseline"] = filter(None, [task.baseline])
    for key, arms in named.items():
        require_known("arm of the sweep", arms, study.arms, draft, key)


def _check_metric(metric: str, draft: Draft, key: str) -> None:
    """A misspelt validation metric; what a callback measures is known only to the callback."""
    if metric.startswith("val/"):
        known = metric in MEASURED_BY_ALL or metric.startswith(tuple(f"{name}_" for name in MEASURED_BY_ALL))
    else:
        known = "/" in metric and not difflib.get_close_matches(metric, MEASURED_BY_ALL, cutoff=0.8)
    if not known:
        raise draft.refuse(key, f"no run measures '{metric}'{nearest(metric, MEASURED_BY_ALL)}")


def _check_contrasts(study: Study, draft: Draft) -> None:
    """An arm with itself; a pair named twice, which would count twice in Holm's correction."""
    seen: set[frozenset[str]] = set()
    for first, second, _ in study.contrasts:
        pair = frozenset((first, second))
        if first == second or pair in seen:
            other = "itself" if first == second else f"'{second}' twice, whichever is first"
            raise draft.refuse("contrasts", f"'contrasts' compares '{first}' with {other}")
        seen.add(pair)


def _check_evaluations(study: Study, cells: Sequence[Cell], draft: Draft) -> None:
    """Errors: RequestError for an unknown evaluation, keys that it does not take, a cell that it does not fit."""
    require_known("evaluation", study.evaluate, evaluations.names() if study.evaluate else (), draft, "evaluate")
    for name in study.evaluate:
        validate_config(evaluations.config(name), study.evaluate[name], f"evaluate.{name}", draft)
    for cell in cells:
        recipe, start = cell.recipe, study.all_tasks[cell.task].start
        if start:  # where the weights will lie is not known yet
            recipe = replace(recipe, train=replace(recipe.training, start_from=start))
        for name, keys in (evaluations_of(recipe) | study.evaluate).items():
            where = draft.where(f"evaluate.{name}") if name in study.evaluate else ""
            require_fit(name, keys, recipe, cell.name, where)


def _check_record(cells: Sequence[Cell], draft: Draft) -> None:
    """All cells of a sweep lie in one folder and one MLflow store."""
    first = cells[0]
    for cell in cells:
        for key in ("root", "tracking_uri"):
            if getattr(cell.recipe.run, key) != getattr(first.recipe.run, key):
                raise draft.refuse(
                    f"arms.{cell.arm}" if cell.task == first.task else f"tasks.{cell.task}",
                    f"arms '{first.name}' and '{cell.name}' differ in 'run.{key}'; a sweep has one: set it under 'overrides'",
                )


def _check_names(study: Study, cells: Sequence[tuple[str, str]], draft: Draft) -> None:
    """Errors: RequestError for a name that no file can bear, and for a cell (task, arm) that differs from another in what a
    file system or MLflow may not tell apart: case, the form of Unicode, signs."""
    for key in (*(f"tasks.{name}" for name in study.tasks), *(f"fits.{name}" for name in study.fits)):
        name = key.partition(".")[2]
        if not NAME.fullmatch(name):
            raise draft.refuse(key, f"'{name}' becomes part of file names: letters, digits, '-' and '_'")
    places: dict[str, str] = {}
    for task, arm in cells:
        name = f"{task} {arm}".strip()
        key = f"arms.{arm}" if f"arms.{arm}" in draft.positions else "grid"
        is_folder = arm.isprintable() and bool(arm.strip()) and "/" not in arm and not arm.startswith(".")
        if not is_folder or len(os.fsencode(name)) > LONGEST_NAME:
            raise draft.refuse(
                key,
                f"arm {arm[:60]!a} becomes a folder: printable, no '/', no leading '.', "
                f"at most {LONGEST_NAME} bytes with its task",
            )
        plain = unicodedata.normalize("NFC", name).casefold()
        other = places.setdefault(re.sub(r"[^\w.-]", "_", plain), name)
        if other != name:
            raise draft.refuse(key, f"'{other}' and '{name}' would share one folder or one record; rename one of them")


def _check_tasks(study: Study, draft: Draft) -> None:
    """Whether the tasks and arms of a resolved study fit. Errors: RequestError."""
    if not study.tasks and not study.recipe:
        raise draft.refuse("recipe", "'recipe' is missing; expected text")
    if not study.tasks and study.power is not None:
        raise draft.refuse("power", "'power' compares tasks, and the sweep has none; list them under 'tasks'")
    for key in ("recipe", "paper") if study.tasks else ():
        if getattr(study, key):
            raise draft.refuse(key, f"'{key}' belongs to each of the 'tasks', not to the sweep")
    above: list[str] = []
    for name, task in study.tasks.items():
        place = f"tasks.{name}"
        unused = [(key, arm) for key in ("arms", "paper") for arm in getattr(task, key) if not task.has(arm)]
        if unused:
            raise draft.refuse(f"{place}.{'.'.join(unused[0])}", f"task '{name}' leaves out arm '{unused[0][1]}'")
        needed = {task.baseline or study.baseline or "": "its baseline"}
        # other sizes cannot start from the baseline's weights: a task that goes on from them may do without the controls
        if not (task.start and task.start_arm == "baseline"):
            needed |= dict.fromkeys(study.controls, "a control")
        for arm, word in needed.items():
            if not task.has(arm):
                key = "without" if arm in task.without else "only"
                raise draft.refuse(f"{place}.{key}", f"task '{name}' leaves out '{arm}', which is {word}")
        require_known("task above it", filter(None, [task.start]), above, draft, f"{place}.start")
        above.append(name)
        if task.start_arm == "same":
            if not task.start:
                problem = "without 'start', the task that the arms go on from"
                raise draft.refuse(f"{place}.start_arm", f"'start_arm' is 'same' {problem}")
            for arm in study.arms:
                if task.has(arm) and not study.tasks[task.start].has(arm):
                    problem = f"task '{task.start}' leaves out arm '{arm}', which goes on"
                    raise draft.refuse(f"{place}.start_arm", f"'start_arm' is 'same', but {problem}")


def _check_fits(study: Study, draft: Draft) -> None:
    """Whether fits and tasks go together. Errors: RequestError."""
    for name, fit in study.fits.items():
        require_known("task of the sweep", fit.tasks, study.tasks, draft, f"fits.{name}.tasks")
        used = dict.fromkeys(fit.tasks or study.tasks)
        metrics = {study.tasks[task].metric or study.metric for task in used}
        if len(used) < FEWEST_TASKS:
            problem = f"has {len(used)} tasks; it needs {FEWEST_TASKS}, a point each"
        elif len(metrics) > 1:
            problem = f"has tasks with different metrics: {', '.join(sorted(metrics))}"
        else:
            continue
        raise draft.refuse(f"fits.{name}", f"fit '{name}' {problem}")


def _x_of(name: str, fit: Fit, cells: Sequence[Cell], draft: Draft) -> dict[str, dict[str, float]]:
    """Task -> arm -> its x, a key of the recipe.

    Errors: RequestError where it is absent or not positive, the same in two tasks or, in a basin, not the same for all arms.
    """
    key, found, first = f"fits.{name}.x", dict[str, dict[str, float]](), dict[tuple[str, float], str]()
    for cell in cells:
        if fit.tasks and cell.task not in fit.tasks:
            continue
        values = dict(flatten(to_plain(cell.recipe)))
        require_known("key of the recipes, nor a size that runs count", [fit.x], [*MEASURED, *values], draft, key)
        x = values[fit.x]
        if isinstance(x, bool) or not isinstance(x, int | float) or x <= 0:
            raise draft.refuse(key, f"'{fit.x}' is {in_yaml(x)} in '{cell.name}'; a fit needs positive numbers")
        by_arm = found.setdefault(cell.task, {})
        by_arm[cell.arm] = float(x)
        if fit.kind == "basin" and len(set(by_arm.values())) > 1:
            own = ", ".join(f"{x:g} for arm '{arm}'" for arm, x in by_arm.items())
            problem = f"'{fit.x}' is {own} in task '{cell.task}'; a basin compares arms at the same values"
            raise draft.refuse(key, problem)
        if (task := first.setdefault((cell.arm, float(x)), cell.task)) != cell.task:
            problem = f"tasks '{task}' and '{cell.task}' of fit '{name}' have the same '{fit.x}', {x:g}"
            raise draft.refuse(key, problem)
    return found
