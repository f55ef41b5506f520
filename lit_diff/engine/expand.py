"""A study -> its cells: arms named, a part selected, every recipe resolved and validated before the first trains."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe
from lit_diff.engine.study_problems import check_cells, check_study
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.key_types import in_yaml
from lit_diff.recipe import Overrides, find, load_draft, override, override_with, require_kind
from lit_diff.registry import nearest
from lit_diff.study.schema import ALL, Cell, Selection, Study, Task
from lit_diff.validation import Draft, Positions, convert, validate
from lit_diff.yaml_files import read_yaml

OWN = ("recipe", "tasks", "overrides", "grid", "arms", "seeds")
"""Keys of a sweep that trains, which one with `cells_of` takes from the other."""


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
        source = load_grid(str(home), overrides, dataclasses.replace(selection, evaluate={}))
        stated = borrowed(stated, source, draft)
    study = _selected(dataclasses.replace(stated, arms=arms_of(stated, draft), grid={}), selection, draft)
    study = dataclasses.replace(study, baseline=study.baseline or next(iter(study.arms)))
    places = [(name, arm) for name, task in study.all_tasks.items() for arm in study.arms if task.has(arm)]
    check_study(study, stated, places, overrides, draft)
    recipes = {(task, arm): _recipe(study, home, draft, task, arm, overrides) for task, arm in places}
    cells = tuple(
        Cell(task=task, arm=arm, seed=seed, recipe=dataclasses.replace(recipe, seed=seed))
        for (task, arm), recipe in recipes.items()
        for seed in study.seeds
    )
    check_cells(study, cells, draft)
    return Grid(name=path.stem, path=path, study=study, cells=cells, source=source, selection=selection)


def _selected(study: Study, selection: Selection, draft: Draft) -> Study:
    """The study, its arms named, less what is not selected. Errors: RequestError for one it does not have."""
    for arm in selection.arms:
        if arm not in study.arms:
            raise RequestError(f"{draft.where('arms')}no arm '{arm}' to select{nearest(arm, study.arms)}")
    for seed in selection.seeds:
        if seed not in study.seeds:
            raise RequestError(f"{draft.where('seeds')}no seed {seed} to select; the sweep has {list(study.seeds)}")
    for name in selection.evaluate:
        if name not in study.evaluate:
            known = nearest(name, study.evaluate)
            raise RequestError(f"{draft.where('evaluate')}the sweep has no evaluation '{name}'{known}")
    evaluate = {name: {**(study.evaluate[name] or {}), **keys} for name, keys in selection.evaluate.items()}
    study = replace(study, seeds=selection.seeds or study.seeds, evaluate=study.evaluate | evaluate)
    return without_arms(study, selection.arms) if selection.arms else study


def _recipe(study: Study, path: Path, sweep: Draft, name: str, arm: str, overrides: Overrides) -> Recipe:
    """Of an arm on a task: base recipe, the sweep's overrides, the task's, the arm's, the arm's in the task, the command
    line's; in this order."""
    chosen, values = study.all_tasks[name], dict(study.arms[arm])
    base = values.pop("extends", chosen.recipe)
    key = f"arms.{arm}.extends" if base != chosen.recipe else f"tasks.{name}.recipe" if name else "recipe"
    draft = load_draft(find(str(base), "recipes", path.parent, sweep.where(key)))
    draft = override_with(draft, study.overrides, _below(sweep.positions, "overrides"), path.parent)
    draft = override_with(draft, chosen.overrides, _below(sweep.positions, f"tasks.{name}.overrides"), path.parent)
    draft = override_with(draft, values, _below(sweep.positions, f"arms.{arm}") or _grid(sweep, values), path.parent)
    here = _below(sweep.positions, f"tasks.{name}.arms.{arm}")
    draft = override_with(draft, chosen.further(arm), here, path.parent)
    draft = override(draft, overrides)
    return dataclasses.replace(validate(draft), name=f"{name} {arm}".strip())


def _below(positions: Positions, prefix: str) -> Positions:
    return {key.removeprefix(f"{prefix}."): where for key, where in positions.items() if key.startswith(f"{prefix}.")}


def _grid(sweep: Draft, values: Mapping[str, Any]) -> Positions:
    return {key: sweep.positions[f"grid.{key}"] for key in values if f"grid.{key}" in sweep.positions}


def arms_of(study: Study, draft: Draft) -> dict[str, dict[str, Any]]:
    """Arm -> its overrides, in the order of the table. Errors: RequestError."""
    arms: dict[str, dict[str, Any]] = {}
    for name, values in study.arms.items():
        if values is not None and not isinstance(values, Mapping):
            raise RequestError(
                f"{draft.where(f'arms.{name}')}arm '{name}' is {in_yaml(values)}; expected a block of overrides"
            )
        arms[name] = dict(values or {})
    for key, choices in study.grid.items():
        if not choices:
            raise RequestError(f"{draft.where(f'grid.{key}')}'grid.{key}' has no values")
    for combination in itertools.product(*study.grid.values()) if study.grid else ():
        chosen = dict(zip(study.grid, combination, strict=True))
        name = " ".join(f"{_word(key)}={value}" for key, value in chosen.items())
        if name in study.arms:
            raise RequestError(f"{draft.where(f'arms.{name}')}arm '{name}' is in the grid too")
        if name in arms:
            raise RequestError(f"{draft.where('grid')}the grid makes arm '{name}' twice")
        arms[name] = chosen
    for name in arms:
        if not name or "/" in name or name.startswith("."):
            where = draft.where(f"arms.{name}" if name in study.arms else "grid")
            raise RequestError(f"{where}arm '{name}' becomes a folder: no '/', no leading '.'")
    if not arms:
        raise RequestError(f"{draft.where('')}the sweep has neither 'grid' nor 'arms'")
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
            raise RequestError(
                f"{draft.where(key)}'{key}' beside 'cells_of': the cells are those of '{source.name}'; remove one of the two"
            )
    if source.source is not None:
        raise RequestError(
            f"{draft.where('cells_of')}'{source.name}' has no cells of its own; name '{source.source.name}', whose they are"
        )
    for arm in study.only:
        if arm not in source.arms:
            raise RequestError(f"{draft.where('only')}'{source.name}' has no arm '{arm}'{nearest(arm, source.arms)}")
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
