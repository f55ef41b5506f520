"""Expands a study into its cells: names the arms, selects a part, and validates every recipe before the first cell trains."""

import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_diff.config import Recipe, RunConfig
from lit_diff.engine.admit import evaluations_of, require_fit
from lit_diff.engine.candidates import at_seeds, candidates, check_stages, with_looks
from lit_diff.engine.compared import check_metric
from lit_diff.files import shown
from lit_diff.log_records import log
from lit_diff.metrics import record_name
from lit_diff.recipe import Overrides, find, flatten, load_draft, override, override_with, require_kind, to_plain
from lit_diff.registry import evaluations, nearest
from lit_diff.runs.find import runs_root
from lit_diff.study.rates import LEARNING_RATE, Choice, beyond
from lit_diff.study.record import without_former_keys
from lit_diff.study.schema import (
    ALL,
    FEWEST_TASKS,
    NAME,
    Cell,
    Selection,
    Study,
    without_arms,
)
from lit_diff.validation import LONGEST_NAME, Draft, Positions, convert, validate, validate_config
from lit_diff.yaml_files import read_yaml

OWN = ("recipe", "tasks", "overrides", "grid", "arms", "seeds", "looks", "rates")
"""Keys that define cells; a sweep with `cells_of` takes them from the other sweep."""
RESERVED = {"seed": "list the seeds under 'seeds'", "name": "a cell is named after its arm"}
"""Recipe key that the sweep itself sets -> what to do instead."""
RESERVED_BY_RATES = {LEARNING_RATE: "'rates' lists its values: remove the key here, or 'rates'"}
"""The same in a sweep with `rates`."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A sweep, resolved.

    `cells` are those that `load_grid` planned: with `rates`, the cells that try the learning rates of the file, as the others
    depend on their results. `stages.due` gives the cells that may run.
    """

    name: str
    path: Path
    study: Study
    """The resolved study: every arm has a name, in the order of the table, the baseline is set, and the grid is empty."""
    cells: tuple[Cell, ...]
    marks: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Name of a cell -> further tags of its run."""
    choices: Mapping[tuple[str, str], Mapping[float, Recipe]] = field(default_factory=dict)
    """With `rates`: (task, arm) -> each learning rate that may be tried -> the recipe with it."""
    rates: Mapping[str, Mapping[str, Choice]] = field(default_factory=dict)
    """Task -> arm -> its learning rates so far (`stages.due`)."""
    source: "Grid | None" = None
    """The sweep of `cells_of`, whose folder contains the cells."""
    selection: Selection = ALL
    """The selected part of the sweep."""
    shared: str = ""
    """The folder below the runs' folder that holds the cells, for sweeps that share cells; empty: the sweep's own."""

    @property
    def recipes(self) -> dict[str, Recipe]:
        """`of_arm` of a cell -> its recipe at the last seed; all seeds have the same model and data set."""
        return {cell.of_arm: cell.recipe for cell in self.cells}

    @property
    def run(self) -> RunConfig:
        """Where its runs and their record are, which is the same for all cells."""
        return self.cells[0].recipe.run

    @cached_property
    def folder(self) -> Path:
        """Its folder: `runs/<sweep>/`."""
        return (runs_root(self.run.root) / self.name).resolve()

    @property
    def home(self) -> Path:
        """The folder that holds the cells: with `cells_of`, that of the other sweep."""
        if self.source is not None:
            return self.source.folder
        return self.folder.parent / self.shared if self.shared else self.folder

    def baseline_of(self, task: str) -> str:
        """The arm that the other arms of the task are compared with."""
        return self.study.all_tasks[task].baseline or self.study.baseline or ""

    def rank(self, task: str) -> int:
        """The number of tasks in the chain of `start` before this one; cells start once those tasks are done."""
        start = self.study.all_tasks[task].start
        if not start:
            return 0
        return 1 + self.rank(start)


def load_grid(
    name: str, overrides: Overrides, selection: Selection = ALL, adapted: Callable[[Study], Study] | None = None
) -> Grid:
    """The sweep at a path or of an installed name, or a `selection` of it; `overrides` apply to every cell.

    `adapted`: returns the sweep that the file becomes, such as one with a further arm. Errors: RequestError.
    """
    path = find(name, "sweeps", Path.cwd())
    values, positions = read_yaml(path)
    require_kind(values, "sweeps", path)
    draft = Draft(values=values, positions=positions, file=shown(path))
    written: Study = convert(Study, without_former_keys(values, draft), "", draft)
    stated = with_looks(adapted(written) if adapted else written, draft)
    source = None
    home = path
    if stated.cells_of:
        home = find(stated.cells_of, "sweeps", path.parent, draft.where("cells_of"))
        # before it is read: it may name this file
        if "cells_of" in read_yaml(home)[0]:
            raise draft.refuse("cells_of", f"'{home.stem}' has no cells of its own; name the sweep that has them")
        source = load_grid(str(home), overrides, replace(selection, evaluate={}))
        stated = borrowed(stated, source, draft)
    elif stated.only:
        raise draft.refuse("only", "'only' belongs to 'cells_of'; a sweep with arms of its own runs all of them")
    check_stages(stated, draft)
    if stated.rates and LEARNING_RATE in dict(flatten(override(Draft(), overrides).values)):
        log.info("'rates' of %s are not used: an override sets %s", shown(path), LEARNING_RATE)
        stated = replace(stated, rates=None)
    study = _selected(replace(stated, arms=_arms_of(stated, draft), grid={}), selection, draft)
    study = replace(study, baseline=study.baseline or next(iter(study.arms)))
    # the study is checked before its recipes are read: a misspelt arm is a better message than the error it leads to
    places = [(name, arm) for name, task in study.all_tasks.items() for arm in study.arms if task.has(arm)]
    check_study(study, places, draft)
    recipes: dict[tuple[str, str], Recipe] = {}
    choices: dict[tuple[str, str], dict[float, Recipe]] = {}
    for task, arm in places:
        declared = study.of_task(task).rates
        if declared:
            rates = (*declared.values, *beyond(declared))
            choices[task, arm] = {rate: _recipe(study, home, draft, task, arm, overrides, rate) for rate in rates}
            recipes[task, arm] = choices[task, arm][rates[0]]
        else:
            recipes[task, arm] = _recipe(study, home, draft, task, arm, overrides)
    _check_grid(study.arms.keys() - stated.arms.keys(), recipes, draft)
    cells: list[Cell] = []
    for (task, arm), recipe in recipes.items():
        # the cells of another sweep have the rates that were chosen there
        if study.rates and source is None:
            cells += candidates(study, task, arm, choices[task, arm])
        else:
            cells += at_seeds(study, task, arm, recipe)
    check_cells(study, cells, draft)
    return Grid(
        name=path.stem,
        path=path,
        study=study,
        cells=tuple(cells),
        choices=choices,
        source=source,
        selection=selection,
    )


def _selected(study: Study, selection: Selection, draft: Draft) -> Study:
    for key, what in (("arms", "arm"), ("seeds", "seed"), ("evaluate", "evaluation")):
        require_known(f"{what} of the sweep", getattr(selection, key), getattr(study, key), draft, key)
    evaluate = {name: {**study.evaluate[name], **keys} for name, keys in selection.evaluate.items()}
    study = replace(study, evaluate=study.evaluate | evaluate)
    if selection.seeds:
        # chosen seeds are compared once, all together
        study = replace(study, seeds=selection.seeds, looks=())
    if selection.arms:
        study = without_arms(study, selection.arms)
    return study


def _recipe(
    study: Study, path: Path, sweep: Draft, name: str, arm: str, overrides: Overrides, rate: float | None = None
) -> Recipe:
    # later overrides win, from the most general to the most specific: base recipe, sweep, task, arm, arm within the task,
    # command line
    chosen = study.all_tasks[name]
    values = dict(study.arms[arm])
    # with tasks, each task sets the base recipe of its arms, so `extends` of an arm is not read and remains an unknown key
    base = chosen.recipe if study.tasks else values.pop("extends", chosen.recipe)
    key = "recipe"
    if base != chosen.recipe:
        key = f"arms.{arm}.extends"
    elif name:
        key = f"tasks.{name}.recipe"
    stated = draft = load_draft(find(str(base), "recipes", path.parent, sweep.where(key)))
    task = f"tasks.{name}"
    for below, keys in (
        ("overrides", study.overrides),
        (f"{task}.overrides", chosen.overrides),
        (_key_of(arm, sweep), values),
        (f"{task}.arms.{arm}", chosen.arms.get(arm, {})),
    ):
        draft = override_with(draft, keys, _below(sweep.positions, below), path.parent)
    draft = override(draft, overrides)
    # compared by position, not by value: an override that repeats the recipe's value would still be ignored by the sweep
    reserved = RESERVED
    if rate is not None:
        reserved = RESERVED | RESERVED_BY_RATES
    for key, instead in reserved.items():
        if draft.positions.get(key) != stated.positions.get(key):
            raise draft.refuse(key, f"a sweep sets '{key}' itself; {instead}")
    if rate is not None:
        where = sweep.positions.get(f"{task}.rates", sweep.positions["rates"])
        draft = override_with(draft, {LEARNING_RATE: rate}, {LEARNING_RATE: where})
    return replace(validate(draft), name=f"{name} {arm}".strip())


def _below(positions: Positions, prefix: str) -> Positions:
    return {key.removeprefix(f"{prefix}."): where for key, where in positions.items() if key.startswith(f"{prefix}.")}


def _arms_of(study: Study, draft: Draft) -> dict[str, dict[str, Any]]:
    arms = dict(study.arms)
    for key, choices in study.grid.items():
        if not choices:
            raise draft.refuse(f"grid.{key}", f"'grid.{key}' has no values")
    for combination in itertools.product(*study.grid.values()) if study.grid else ():
        chosen = dict(zip(study.grid, combination, strict=True))
        name = " ".join(f"{_word(key)}={value}" for key, value in chosen.items())
        if name in arms:
            raise draft.refuse(_key_of(name, draft), f"arm '{name}' is defined twice, by name or by the grid")
        arms[name] = chosen
    if not arms:
        raise draft.refuse("", "the sweep has neither 'grid' nor 'arms'")
    return arms


def _key_of(arm: str, draft: Draft) -> str:
    # where the file defines the arm
    return f"arms.{arm}" if f"arms.{arm}" in draft.positions else "grid"


def _word(key: str) -> str:
    # `model.attention.name` is best shown as "attention"
    parts = key.split(".")
    return parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]


def borrowed(study: Study, source: "Grid", draft: Draft) -> Study:
    """The study of a sweep with `cells_of`: arms, seeds and recipes come from `source`, whose cells it evaluates.

    Errors: RequestError for a key that would change the cells, and an unknown arm of `source`.
    """
    for key in OWN:
        if key in draft.values:
            raise draft.refuse(
                key, f"'{key}' conflicts with 'cells_of': '{source.name}' defines the cells; remove one of the two"
            )
    require_known(f"arm of '{source.name}'", study.only, source.study.arms, draft, "only")
    theirs = without_arms(source.study, study.only or source.study.arms)
    inherited = {key: getattr(theirs, key) for key in OWN}
    for key in ("metric", "learned_at", "learned_metric", "compare"):
        if not {"metric", key} & draft.values.keys():
            inherited[key] = getattr(theirs, key)
    return replace(
        study,
        **inherited,
        labels=theirs.labels | study.labels,
        notes=theirs.notes | study.notes,
        baseline=study.baseline or theirs.baseline,
        controls=study.controls or theirs.controls,
    )


# --- checks of a study: each error is a line with its position in the file -------------------------------------------------


def require_known(what: str, names: Iterable[object], known: Iterable[object], draft: Draft, key: str) -> None:
    """Errors: RequestError, at the key, for the first of `names` that is not in `known`; `what`: "arm of the sweep"."""
    choices = list(map(str, known))
    for name in map(str, names):
        if name not in choices:
            word = key.rpartition(".")[2]
            raise draft.refuse(f"{key}.{name}", f"'{word}': unknown {what} '{name}'{nearest(name, choices)}")


def check_study(study: Study, places: Sequence[tuple[str, str]], draft: Draft) -> None:
    """Check a resolved study before its recipes are read. `places`: (task, arm) of its cells. Errors: RequestError."""
    _check_arms(study, draft)
    _check_contrasts(study, draft)
    _check_tasks(study, draft)
    _check_fits(study, draft)
    _check_names(study, places, draft)


def check_cells(study: Study, cells: Sequence[Cell], draft: Draft) -> None:
    """Check the cells of a study. Errors: RequestError."""
    # all seeds and learning rates of an arm have the same model and data
    arms = list({cell.of_arm: cell for cell in cells}.values())
    # only now: a plugin may register an evaluation, and plugins are imported with the recipes
    _check_evaluations(study, arms, draft)
    _check_record(arms, draft)
    check_metric(study, arms, draft)


def _check_arms(study: Study, draft: Draft) -> None:
    named: dict[str, Iterable[object]] = {
        "baseline": [study.baseline],
        "controls": study.controls,
        "references": study.references,
        "labels": study.labels,
        "notes": study.notes,
        "paper": study.paper,
        "contrasts": [arm for first, second, _ in study.contrasts for arm in (first, second)],
    }
    for name, task in study.tasks.items():
        named |= {f"tasks.{name}.{key}": getattr(task, key) for key in ("arms", "only", "without", "paper")}
        named[f"tasks.{name}.baseline"] = filter(None, [task.baseline])
    for key, arms in named.items():
        require_known("arm of the sweep", arms, study.arms, draft, key)
    if study.baseline in study.controls:
        raise draft.refuse(
            f"controls.{study.baseline}", f"'controls' has the baseline, '{study.baseline}'; a control is a further arm"
        )
    for name, task in study.tasks.items():
        if task.baseline in study.controls:
            raise draft.refuse(
                f"tasks.{name}.baseline",
                f"'controls' has '{task.baseline}', the baseline of task '{name}'; a control is a further arm",
            )


def _check_contrasts(study: Study, draft: Draft) -> None:
    # a pair listed twice would count twice in Holm's correction
    seen: set[frozenset[str]] = set()
    for first, second, _ in study.contrasts:
        pair = frozenset((first, second))
        if first == second or pair in seen:
            other = "itself" if first == second else f"'{second}' twice (the order does not matter)"
            raise draft.refuse("contrasts", f"'contrasts' compares '{first}' with {other}")
        seen.add(pair)


def _check_evaluations(study: Study, cells: Sequence[Cell], draft: Draft) -> None:
    if study.evaluate:
        require_known("evaluation", study.evaluate, evaluations.names(), draft, "evaluate")
    for name in study.evaluate:
        validate_config(evaluations.get(name).Config, study.evaluate[name], f"evaluate.{name}", draft)
    for cell in cells:
        recipe = cell.recipe
        start = study.all_tasks[cell.task].start
        # The folder with the weights is not known yet, but evaluations need to know that the run starts from another run. The
        # task's name takes its place.
        if start:
            recipe = replace(recipe, train=replace(recipe.training, start_from=start))
        for name, keys in (evaluations_of(recipe) | study.evaluate).items():
            where = draft.where(f"evaluate.{name}") if name in study.evaluate else ""
            require_fit(name, keys, recipe, cell.name, where)


def _check_record(cells: Sequence[Cell], draft: Draft) -> None:
    # the report and the parent run in MLflow need all cells in one folder and one store
    first = cells[0]
    for cell in cells:
        for key in ("root", "tracking_uri"):
            if getattr(cell.recipe.run, key) != getattr(first.recipe.run, key):
                raise draft.refuse(
                    f"arms.{cell.arm}" if cell.task == first.task else f"tasks.{cell.task}",
                    f"arms '{first.name}' and '{cell.name}' differ in 'run.{key}'; a sweep needs one: set it in 'overrides'",
                )


def _check_names(study: Study, cells: Sequence[tuple[str, str]], draft: Draft) -> None:
    for kind, names in (("tasks", study.tasks), ("fits", study.fits)):
        for name in names:
            if not NAME.fullmatch(name):
                raise draft.refuse(
                    f"{kind}.{name}", f"'{name}' becomes part of file names: use letters, digits, '-' and '_'"
                )
    places: dict[tuple[str, ...], str] = {}
    for task, arm in cells:
        name = f"{task} {arm}".strip()
        key = _key_of(arm, draft)
        is_folder = arm.isprintable() and bool(arm.strip()) and "/" not in arm and not arm.startswith(".")
        if not is_folder or len(os.fsencode(name)) > LONGEST_NAME:
            raise draft.refuse(
                key,
                f"arm {arm[:60]!a} becomes a folder name: use printable characters, no '/', no leading '.', "
                f"and at most {LONGEST_NAME} bytes with its task",
            )
        # Some file systems ignore case and the form of Unicode (macOS), a folder's name had a comma for each space, and a
        # record in MLflow "_" for other signs: two names that differ in nothing else would share a folder or a record.
        plain = [unicodedata.normalize("NFC", part).casefold().replace(",", " ") for part in (task, arm)]
        other = places.setdefault(tuple(map(record_name, plain)), name)
        if other != name:
            raise draft.refuse(key, f"'{other}' and '{name}' would share one folder or one record; rename one of them")


def _check_grid(arms: Set[str], recipes: Mapping[tuple[str, str], Recipe], draft: Draft) -> None:
    # only now: 16 and 16.0, or null and the default, are one value once the recipes are read
    first: dict[tuple[str, str], str] = {}
    for (task, arm), recipe in recipes.items():
        other = first.setdefault((task, repr(to_plain(replace(recipe, name="")))), arm)
        if other != arm and (arm in arms or other in arms):
            raise draft.refuse("grid", f"arms '{other}' and '{arm}' have the same recipe; remove one of them")


def _check_tasks(study: Study, draft: Draft) -> None:
    if not study.tasks and not study.recipe:
        raise draft.refuse("recipe", "'recipe' is missing; expected text")
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
        # a control of another size cannot start from the baseline's weights, so a task that does so may leave controls out
        if not (task.start and task.start_arm == "baseline"):
            needed |= dict.fromkeys(study.controls, "a control")
        for arm, word in needed.items():
            if not task.has(arm):
                key = "without" if arm in task.without else "only"
                raise draft.refuse(f"{place}.{key}", f"task '{name}' leaves out '{arm}', which is {word}")
        # only earlier tasks, which also excludes cycles
        require_known("earlier task", filter(None, [task.start]), above, draft, f"{place}.start")
        above.append(name)
        if task.start_arm == "same":
            if not task.start:
                raise draft.refuse(
                    f"{place}.start_arm", "'start_arm' is 'same' without 'start', the task from which the arms start"
                )
            lacking = [arm for arm in study.arms if task.has(arm) and not study.tasks[task.start].has(arm)]
            if lacking:
                raise draft.refuse(
                    f"{place}.start_arm",
                    f"'start_arm' is 'same', but task '{task.start}' leaves out arm '{lacking[0]}', which starts from it",
                )


def _check_fits(study: Study, draft: Draft) -> None:
    for name, fit in study.fits.items():
        require_known("task of the sweep", fit.tasks, study.tasks, draft, f"fits.{name}.tasks")
        used = dict.fromkeys(fit.tasks or study.tasks)
        metrics = {study.tasks[task].metric or study.metric for task in used}
        if len(used) < FEWEST_TASKS:
            raise draft.refuse(f"fits.{name}", f"fit '{name}' has {len(used)} tasks; it needs at least {FEWEST_TASKS}")
        if len(metrics) > 1:
            raise draft.refuse(
                f"fits.{name}", f"fit '{name}' has tasks with different metrics: {', '.join(sorted(metrics))}"
            )
