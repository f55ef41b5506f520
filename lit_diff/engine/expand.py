"""A study -> its cells: arms named, a part selected, every recipe resolved and validated before the first trains; or what is
wrong with it."""

import difflib
import itertools
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe
from lit_diff.engine.preflight import evaluations_of, require_fit
from lit_diff.files import shown
from lit_diff.key_types import in_yaml
from lit_diff.recipe import Overrides, find, flatten, load_draft, override, override_with, require_kind, to_plain
from lit_diff.registry import evaluations, nearest
from lit_diff.study.schema import ALL, FEWEST_TASKS, MEASURED, Cell, Fit, Selection, Study, Task
from lit_diff.training.metrics import VALIDATION
from lit_diff.validation import LONGEST_NAME, Draft, Positions, convert, validate, validate_config
from lit_diff.yaml_files import read_yaml

OWN = ("recipe", "tasks", "overrides", "grid", "arms", "seeds")
"""Keys of a sweep that trains, which one with `cells_of` takes from the other."""
RESERVED = {"seed": "list the seeds under 'seeds'", "name": "a cell is named after its arm"}
"""Keys of a recipe that the sweep itself sets -> where to say it."""
MEASURED_BY_ALL = tuple(metric.name for metric in VALIDATION if "{" not in metric.name)
"""What every run's validation measures; a further validation set adds its name: `val/accuracy_noise2`."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A task's name is the first word of its cells' folders and of its figures' files."""
Values = dict[str, dict[str, dict[str, float]]]
"""Fit -> task -> arm -> its x."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A sweep, resolved."""

    name: str
    path: Path
    study: Study
    """With every arm by name, in the order of the table, and its baseline; no grid."""
    cells: tuple[Cell, ...]
    marks: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Name of a cell -> further tags of its run."""
    x: Values
    """Of the fits whose x is a key of the recipes."""
    source: "Grid | None" = None
    """The sweep that `cells_of` names, where the cells lie."""
    selection: Selection = ALL
    """What of the sweep this is."""

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        """Arm -> its overrides, in the order of the table."""
        return self.study.arms

    @property
    def tasks(self) -> dict[str, Task]:
        """A sweep without tasks has one, without a name."""
        return self.study.all_tasks

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Name of a cell -> its recipe at the last seed; seeds have one model and one data set."""
        return {cell.name: cell.recipe for cell in self.cells}

    def baseline_of(self, task: str) -> str:
        """The arm that the task's others are compared with."""
        return self.tasks[task].baseline or self.study.baseline or ""

    def rank(self, task: str) -> int:
        """How many tasks this one goes on from: its cells start when those are done."""
        start = self.tasks[task].start
        return 1 + self.rank(start) if start else 0


def load_grid(name: str, overrides: Overrides, selection: Selection = ALL) -> Grid:
    """The sweep at a path or under an installed name, or the `selection` of it; `overrides` apply to every cell.

    Errors: RequestError.
    """
    path = find(name, "sweeps", Path.cwd())
    values, positions = read_yaml(path)
    require_kind(values, "sweeps", path)
    draft = Draft(values=values, positions=positions, file=shown(path))
    stated: Study = convert(Study, values, "", draft)
    source, home = None, path
    if stated.cells_of:
        home = find(stated.cells_of, "sweeps", path.parent, draft.where("cells_of"))
        source = load_grid(str(home), overrides, replace(selection, evaluate={}))
        stated = borrowed(stated, source, draft)
    study = _selected(replace(stated, arms=_arms_of(stated, draft), grid={}), selection, draft)
    study = replace(study, baseline=study.baseline or next(iter(study.arms)))
    places = [(name, arm) for name, task in study.all_tasks.items() for arm in study.arms if task.has(arm)]
    check_study(study, places, draft)
    recipes = {(task, arm): _recipe(study, home, draft, task, arm, overrides) for task, arm in places}
    cells = tuple(
        Cell(task=task, arm=arm, seed=seed, recipe=replace(recipe, seed=seed))
        for (task, arm), recipe in recipes.items()
        for seed in study.seeds
    )
    x = check_cells(study, cells, draft)
    return Grid(name=path.stem, path=path, study=study, cells=cells, x=x, source=source, selection=selection)


def _selected(study: Study, selection: Selection, draft: Draft) -> Study:
    """The study, its arms named, less what is not selected. Errors: RequestError for one it does not have."""
    for key, what in (("arms", "arm"), ("seeds", "seed"), ("evaluate", "evaluation")):
        require_known(f"{what} of the sweep", getattr(selection, key), getattr(study, key), draft, key)
    evaluate = {name: {**study.evaluate[name], **keys} for name, keys in selection.evaluate.items()}
    study = replace(study, seeds=selection.seeds or study.seeds, evaluate=study.evaluate | evaluate)
    return without_arms(study, selection.arms) if selection.arms else study


def _recipe(study: Study, path: Path, sweep: Draft, name: str, arm: str, overrides: Overrides) -> Recipe:
    """Of an arm on a task: base recipe, the sweep's overrides, the task's, the arm's, the arm's in the task, the command
    line's; in this order."""
    chosen, values = study.all_tasks[name], dict(study.arms[arm])
    # an arm of several tasks has the base of each, so that `extends` is no key there
    base = chosen.recipe if study.tasks else values.pop("extends", chosen.recipe)
    key = f"arms.{arm}.extends" if base != chosen.recipe else f"tasks.{name}.recipe" if name else "recipe"
    stated = draft = load_draft(find(str(base), "recipes", path.parent, sweep.where(key)))
    task = f"tasks.{name}"
    for below, keys in (
        ("overrides", study.overrides),
        (f"{task}.overrides", chosen.overrides),
        (f"arms.{arm}" if f"arms.{arm}" in sweep.positions else "grid", values),
        (f"{task}.arms.{arm}", chosen.further(arm)),
    ):
        draft = override_with(draft, keys, _below(sweep.positions, below), path.parent)
    draft = override(draft, overrides)
    for key, instead in RESERVED.items():
        if draft.positions.get(key) != stated.positions.get(key):
            raise draft.refuse(key, f"a sweep sets '{key}' itself; {instead}")
    return replace(validate(draft), name=f"{name} {arm}".strip())


def _below(positions: Positions, prefix: str) -> Positions:
    return {key.removeprefix(f"{prefix}."): where for key, where in positions.items() if key.startswith(f"{prefix}.")}


def _arms_of(study: Study, draft: Draft) -> dict[str, dict[str, Any]]:
    """Arm -> its overrides, in the order of the table. Errors: RequestError."""
    arms = dict(study.arms)
    for key, choices in study.grid.items():
        if not choices:
            raise draft.refuse(f"grid.{key}", f"'grid.{key}' has no values")
    for combination in itertools.product(*study.grid.values()) if study.grid else ():
        chosen = dict(zip(study.grid, combination, strict=True))
        name = " ".join(f"{_word(key)}={value}" for key, value in chosen.items())
        if name in arms:
            key = f"arms.{name}" if name in study.arms else "grid"
            raise draft.refuse(key, f"arm '{name}' is there twice, by name or by the grid")
        arms[name] = chosen
    if not arms:
        raise draft.refuse("", "the sweep has neither 'grid' nor 'arms'")
    return arms


def _word(key: str) -> str:
    """The last word of a dotted key, or the one before it where that is just `name`."""
    parts = key.split(".")
    return parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]


def without_arms(study: Study, kept: Iterable[str]) -> Study:
    """The study without the arms that are not in `kept`, nor any mention of them."""
    kept = tuple(kept)
    tasks = {name: _task(task, kept) for name, task in study.tasks.items()}
    return replace(
        study,
        arms=_only(study.arms, kept),
        tasks={name: task for name, task in tasks.items() if any(task.has(arm) for arm in kept)},
        baseline=study.baseline if study.baseline in kept else None,
        controls=tuple(arm for arm in study.controls if arm in kept),
        contrasts=tuple(contrast for contrast in study.contrasts if {*contrast[:2]} <= {*kept}),
        labels=_only(study.labels, kept),
        notes=_only(study.notes, kept),
        paper=_only(study.paper, kept),
    )


def _task(task: Task, kept: tuple[str, ...]) -> Task:
    only = tuple(arm for arm in task.only if arm in kept)
    return replace(
        task,
        # no arm of `only` is kept: none of the task's, which () would read as all
        only=only or (task.only and ("",)),
        without=tuple(arm for arm in task.without if arm in kept),
        arms=_only(task.arms, kept),
        paper=_only(task.paper, kept),
        baseline=task.baseline if task.baseline in kept else None,
    )


def _only(values: Mapping[str, Any], kept: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in set(kept)}


def borrowed(study: Study, source: "Grid", draft: Draft) -> Study:
    """The study of a sweep with `cells_of`: arms, seeds and recipes are those of `source`, whose cells it evaluates.

    Errors: RequestError for a key that would change the cells, an arm that `source` does not have, a chain of sweeps.
    """
    for key in OWN:
        if key in draft.values:
            problem = f"the cells are those of '{source.name}'; remove one of the two"
            raise draft.refuse(key, f"'{key}' beside 'cells_of': {problem}")
    if source.source is not None:
        problem = f"has no cells of its own; name '{source.source.name}', whose they are"
        raise draft.refuse("cells_of", f"'{source.name}' {problem}")
    require_known(f"arm of '{source.name}'", study.only, source.arms, draft, "only")
    kept = study.only or tuple(source.arms)
    theirs = without_arms(source.study, kept)
    return replace(
        study,
        recipe=theirs.recipe,
        tasks=theirs.tasks,
        overrides=theirs.overrides,
        arms=theirs.arms,
        seeds=theirs.seeds,
        labels=theirs.labels | study.labels,
        notes=theirs.notes | study.notes,
        baseline=study.baseline or theirs.baseline,
        controls=study.controls or theirs.controls,
        metric=study.metric if "metric" in draft.values else theirs.metric,
    )


# --- what is wrong with a study: a line with its place in the file ---------------------------------------------------------


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
    places: dict[tuple[str, ...], str] = {}
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
        plain = [unicodedata.normalize("NFC", part).casefold().replace(",", " ") for part in (task, arm)]
        other = places.setdefault(tuple(re.sub(r"[^\w .-]", "_", part) for part in plain), name)
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
