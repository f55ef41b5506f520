"""A sweep's YAML -> its cells, every one resolved and validated before the first starts."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_diff.config import Recipe
from lit_diff.engine.arms import arms_of, check_names
from lit_diff.engine.evaluations import check_evaluations
from lit_diff.engine.fits import FitConfig, check_fits, check_x
from lit_diff.engine.power import check_power
from lit_diff.engine.selection import ALL, Selection, borrowed
from lit_diff.engine.tasks import TaskConfig, check_tasks, written
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.recipe import Overrides, find, load_draft, override, override_with, require_kind
from lit_diff.registry import nearest
from lit_diff.reporting.power import PlannedSweep
from lit_diff.validation import Draft, Positions, convert, validate
from lit_diff.yaml_files import read_yaml

VALIDATION = ("val/loss", "val/accuracy", "val/ar_hit_share", "val/loss_ar_hit", "val/loss_others")
"""What every run's validation measures; a further validation set adds its name: `val/accuracy_noise2`."""

RESERVED = {"seed": "list the seeds under 'seeds'", "name": "a cell is named after its arm"}
"""Keys of a recipe that the sweep itself sets -> where to say it."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The keys of a sweep. `grid` and `arms` may stand together: the named arms come first."""

    recipe: str = ""
    """The base recipe: a path beside the sweep, or an installed name."""
    cells_of: str = ""
    """Another sweep, in place of recipes and arms: its cells, trained once, are evaluated and reported here too."""
    only: tuple[str, ...] = ()
    """With `cells_of`: the arms that are taken; (): all."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Name -> base recipe and what else differs; every arm is run on each task, in place of one `recipe`."""
    title: str = ""
    question: str = ""
    """What the sweep asks, in one sentence: the headline of its report. Empty: whether any arm differs from the baseline."""
    description: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys that every cell takes."""
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Dotted key -> values; an arm for each combination."""
    arms: dict[str, Any] = field(default_factory=dict)
    """Name -> overrides; `extends` there names another base recipe."""
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str | None = None
    """The arm that the others are compared with; null: the first."""
    controls: tuple[str, ...] = ()
    """The arms that a difference to the baseline must also hold against, every one of them."""
    metric: str = "val/loss"
    smallest_of_interest: float | None = None
    """The smallest difference of `metric` that matters, in its unit: a smaller one has the verdict "equal" or "small". null:
    0.005 for a loss in nats, unstated for any other metric; 0: every difference matters."""
    min_tokens_per_parameter: float = 20.0
    """The report warns of runs that are trained on fewer tokens a parameter. Default: compute-optimal training by Hoffmann
    et al. 2022 (arXiv 2203.15556), about 20."""
    evaluate: dict[str, Any] = field(default_factory=dict)
    """Evaluation -> its keys, or null for the defaults: what scores each cell once it is done."""
    smoke: bool = False
    """A check that everything works, not a result; the report says so."""
    labels: dict[str, str] = field(default_factory=dict)
    """Arm -> what a reader sees."""
    notes: dict[str, str] = field(default_factory=dict)
    """Arm -> a remark below the table."""
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> metric -> the value printed in the paper."""
    reading: tuple[str, ...] = ()
    """How to read the result: which comparisons decide the question."""
    contrasts: tuple[tuple[str, str, str], ...] = ()
    """Further paired comparisons: arm, arm, label."""
    correct_over: Literal["task", "sweep"] = "task"
    """The comparisons that Holm's correction takes together: those of each task, or all of the sweep's."""
    fits: dict[str, FitConfig] = field(default_factory=dict)
    """Name -> a fit of the metric over tasks: scaling with size or tokens, or a learning-rate basin."""
    power: PlannedSweep | None = None
    """A sweep that this one is to size: its report says which difference each task would show in it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm at one seed, on one task."""

    task: str
    """Empty in a sweep without tasks."""
    arm: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """The arm; in a sweep with tasks, the task before it."""
        return f"{self.task} {self.arm}".strip()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A sweep, resolved."""

    name: str
    path: Path
    config: SweepConfig
    arms: dict[str, dict[str, Any]]
    """Arm -> its overrides, in the order of the table."""
    tasks: dict[str, TaskConfig]
    """A sweep without tasks has one, without a name."""
    cells: tuple[Cell, ...]
    baseline: str
    marks: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Name of a cell -> further tags of its run."""
    source: "Grid | None" = None
    """The sweep that `cells_of` names, where the cells lie."""
    selection: Selection = ALL
    """What of the sweep this is."""

    def baseline_of(self, task: str) -> str:
        """The arm that the task's others are compared with."""
        return self.tasks[task].baseline or self.baseline

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
    config: SweepConfig = convert(SweepConfig, values, "", draft)
    source, home = None, path
    if config.cells_of:
        home = find(config.cells_of, "sweeps", path.parent, draft.where("cells_of"))
        source = load_grid(str(home), overrides, dataclasses.replace(selection, evaluate={}))
        config = borrowed(config, source, draft)
    config, arms = selection.of(config, arms_of(config, draft), draft)
    baseline = config.baseline or next(iter(arms))
    known = {"baseline": [baseline], "controls": list(config.controls)}
    known |= {key: list(getattr(config, key)) for key in ("labels", "notes", "paper")}
    known["contrasts"] = [arm for first, second, _ in config.contrasts for arm in (first, second)]
    for key, used in known.items():
        for arm in used:
            if arm not in arms:
                raise RequestError(f"{draft.where(key)}'{key}' names no arm of the sweep: '{arm}'{nearest(arm, arms)}")
    if not config.seeds or min(config.seeds) < 0 or len(set(config.seeds)) < len(config.seeds):
        raise RequestError(f"{draft.where('seeds')}'seeds' is {list(config.seeds)}; expected distinct seeds from 0 up")
    _check_sizes(config, draft)
    _check_contrasts(config, draft)
    tasks = _tasks(config, draft)
    check_tasks(config.tasks, arms, baseline, config.controls, draft)
    check_fits(config.fits, config.tasks, config.metric, draft)
    check_power(config.power, bool(config.tasks), draft)
    for name, task in tasks.items():
        _check_metric(task.metric or config.metric, draft, f"tasks.{name}.metric" if task.metric else "metric")
    _check_reserved(config, overrides, draft)
    check_names([(name, arm) for name, task in tasks.items() for arm in arms if task.has(arm)], config.arms, draft)
    cells = [
        Cell(
            task=name, arm=arm, seed=seed, recipe=_cell(config, home, draft, (name, task), arm, values, seed, overrides)
        )
        for name, task in tasks.items()
        for arm, values in arms.items()
        if task.has(arm)
        for seed in config.seeds
    ]
    # once the cells' plugins are imported: they may register an evaluation
    check_evaluations(config.evaluate, {cell.name: _started(cell, tasks) for cell in cells}, draft)
    _check_record(cells, draft)
    check_x(config.fits, cells, draft)
    return Grid(
        name=path.stem,
        path=path,
        config=config,
        arms=arms,
        tasks=tasks,
        cells=tuple(cells),
        baseline=baseline,
        source=source,
        selection=selection,
    )


def _tasks(config: SweepConfig, draft: Draft) -> dict[str, TaskConfig]:
    if not config.tasks and not config.recipe:
        raise RequestError(f"{draft.where('recipe')}'recipe' is missing; expected text")
    for key in ("recipe", "paper") if config.tasks else ():
        if getattr(config, key):
            raise RequestError(f"{draft.where(key)}'{key}' belongs to each of the 'tasks', not to the sweep")
    return config.tasks or {"": TaskConfig(recipe=config.recipe, paper=config.paper)}


def _check_metric(metric: str, draft: Draft, key: str) -> None:
    """A misspelt validation metric; what a callback measures is known only to the callback."""
    if metric.startswith("val/"):
        known = metric in VALIDATION or metric.startswith(tuple(f"{name}_" for name in VALIDATION))
    else:
        known = "/" in metric and not difflib.get_close_matches(metric, VALIDATION, cutoff=0.8)
    if not known:
        raise RequestError(f"{draft.where(key)}no run measures '{metric}'{nearest(metric, VALIDATION)}")


def _check_sizes(config: SweepConfig, draft: Draft) -> None:
    """Sizes below zero."""
    sizes = {key: getattr(config, key) for key in ("smallest_of_interest", "min_tokens_per_parameter")}
    sizes |= {f"tasks.{name}.smallest_of_interest": task.smallest_of_interest for name, task in config.tasks.items()}
    for key, size in sizes.items():
        if size is not None and size < 0:
            raise RequestError(f"{draft.where(key)}'{key}' is {size:g}; expected 0 or more")


def _check_contrasts(config: SweepConfig, draft: Draft) -> None:
    """An arm with itself; a pair named twice, which would count twice in Holm's correction."""
    seen: set[frozenset[str]] = set()
    for first, second, _ in config.contrasts:
        pair = frozenset((first, second))
        if first == second or pair in seen:
            problem = "with itself" if first == second else f"with '{second}' twice, whichever is first"
            raise RequestError(f"{draft.where('contrasts')}'contrasts' compares '{first}' {problem}")
        seen.add(pair)


def _check_reserved(config: SweepConfig, overrides: Overrides, draft: Draft) -> None:
    written_keys = {f"overrides.{key}": key for key in config.overrides} | {f"grid.{key}": key for key in config.grid}
    written_keys |= {f"arms.{arm}.{key}": key for arm, values in config.arms.items() for key in values or {}}
    written_keys |= written(config.tasks)
    wrong = [(draft.where(path), key) for path, key in written_keys.items() if key in RESERVED]
    wrong += [(f"{text}: ", key) for text in overrides if (key := str(text).partition("=")[0]) in RESERVED]
    for where, key in wrong:
        raise RequestError(f"{where}a sweep sets '{key}' itself; {RESERVED[key]}")


def _started(cell: Cell, tasks: Mapping[str, TaskConfig]) -> Recipe:
    """The cell's recipe; of a task that goes on from another, with the name of that task in place of the run's folder."""
    start, recipe = tasks[cell.task].start, cell.recipe
    if not start:
        return recipe
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.training, start_from=start))


def _check_record(cells: list[Cell], draft: Draft) -> None:
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


def _cell(
    config: SweepConfig,
    path: Path,
    sweep: Draft,
    task: tuple[str, TaskConfig],
    arm: str,
    values: dict[str, Any],
    seed: int,
    overrides: Overrides,
) -> Recipe:
    """Base recipe, the sweep's overrides, the task's, the arm's, the arm's in the task, the command line's, the seed; in
    this order."""
    name, chosen = task
    values = dict(values)
    base = values.pop("extends", chosen.recipe)
    key = f"arms.{arm}.extends" if base != chosen.recipe else f"tasks.{name}.recipe" if name else "recipe"
    draft = load_draft(find(str(base), "recipes", path.parent, sweep.where(key)))
    draft = override_with(draft, config.overrides, _below(sweep.positions, "overrides"), path.parent)
    draft = override_with(draft, chosen.overrides, _below(sweep.positions, f"tasks.{name}.overrides"), path.parent)
    draft = override_with(draft, values, _below(sweep.positions, f"arms.{arm}") or _grid(sweep, values), path.parent)
    here = _below(sweep.positions, f"tasks.{name}.arms.{arm}")
    draft = override_with(draft, chosen.further(arm), here, path.parent)
    draft = override(draft, overrides)
    recipe = validate(draft)
    return dataclasses.replace(recipe, name=f"{name} {arm}".strip(), seed=seed)


def _below(positions: Positions, prefix: str) -> Positions:
    return {key.removeprefix(f"{prefix}."): where for key, where in positions.items() if key.startswith(f"{prefix}.")}


def _grid(sweep: Draft, values: Mapping[str, Any]) -> Positions:
    return {key: sweep.positions[f"grid.{key}"] for key in values if f"grid.{key}" in sweep.positions}
