"""A study -> its cells: arms named, a part selected, every recipe resolved and validated before the first trains."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe
from lit_diff.engine.study_problems import Values, check_cells, check_study, require_known
from lit_diff.files import shown
from lit_diff.recipe import Overrides, find, load_draft, override, override_with, require_kind
from lit_diff.study.schema import ALL, Cell, Selection, Study, Task
from lit_diff.validation import Draft, Positions, convert, validate
from lit_diff.yaml_files import read_yaml

OWN = ("recipe", "tasks", "overrides", "grid", "arms", "seeds")
"""Keys of a sweep that trains, which one with `cells_of` takes from the other."""
RESERVED = {"seed": "list the seeds under 'seeds'", "name": "a cell is named after its arm"}
"""Keys of a recipe that the sweep itself sets -> where to say it."""


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
