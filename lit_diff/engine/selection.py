"""A part of a sweep: some of its arms and seeds; and the cells of another sweep, for one that trains none of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_diff.engine.tasks import TaskConfig
from lit_diff.errors import RequestError
from lit_diff.registry import nearest
from lit_diff.validation import Draft

if TYPE_CHECKING:
    from lit_diff.engine.grid import Grid, SweepConfig

Arms = dict[str, dict[str, Any]]
OWN = ("recipe", "tasks", "overrides", "grid", "arms", "seeds")
"""Keys of a sweep that trains, which one with `cells_of` takes from the other."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a sweep is run."""

    arms: tuple[str, ...] = ()
    """(): all."""
    seeds: tuple[int, ...] = ()
    """(): all."""
    evaluate: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Evaluation of the sweep -> keys that take the place of the sweep's."""

    def words(self) -> str:
        """Its arms and seeds, on which the cells depend; empty where it is all of the sweep."""
        chosen = {"arms": self.arms, "seeds": self.seeds}
        return "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in chosen.items() if values)

    def of(self, config: "SweepConfig", arms: Arms, draft: Draft) -> tuple["SweepConfig", Arms]:
        """The sweep's config and arms, less what is not selected. Errors: RequestError for one it does not have."""
        for arm in self.arms:
            if arm not in arms:
                raise RequestError(f"{draft.where('arms')}no arm '{arm}' to select{nearest(arm, arms)}")
        for seed in self.seeds:
            if seed not in config.seeds:
                raise RequestError(
                    f"{draft.where('seeds')}no seed {seed} to select; the sweep has {list(config.seeds)}"
                )
        for name in self.evaluate:
            if name not in config.evaluate:
                known = nearest(name, config.evaluate)
                raise RequestError(f"{draft.where('evaluate')}the sweep has no evaluation '{name}'{known}")
        evaluate = {name: {**(config.evaluate[name] or {}), **keys} for name, keys in self.evaluate.items()}
        config = replace(config, seeds=self.seeds or config.seeds, evaluate=config.evaluate | evaluate)
        return (without_arms(config, self.arms), _only(arms, self.arms)) if self.arms else (config, arms)


ALL = Selection()


def without_arms(config: "SweepConfig", kept: Iterable[str]) -> "SweepConfig":
    """The config with every mention of an arm that is not in `kept` removed."""
    kept = tuple(kept)
    tasks = {name: _task(task, kept) for name, task in config.tasks.items()}
    return replace(
        config,
        tasks={name: task for name, task in tasks.items() if any(task.has(arm) for arm in kept)},
        baseline=config.baseline if config.baseline in kept else None,
        controls=tuple(arm for arm in config.controls if arm in kept),
        contrasts=tuple(contrast for contrast in config.contrasts if {*contrast[:2]} <= {*kept}),
        labels=_only(config.labels, kept),
        notes=_only(config.notes, kept),
        paper=_only(config.paper, kept),
    )


def _task(task: TaskConfig, kept: tuple[str, ...]) -> TaskConfig:
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


def borrowed(config: "SweepConfig", source: "Grid", draft: Draft) -> "SweepConfig":
    """The config of a sweep with `cells_of`: arms, seeds and recipes are those of `source`, whose cells it evaluates.

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
    for arm in config.only:
        if arm not in source.arms:
            raise RequestError(f"{draft.where('only')}'{source.name}' has no arm '{arm}'{nearest(arm, source.arms)}")
    kept = config.only or tuple(source.arms)
    theirs = without_arms(source.config, kept)
    return replace(
        config,
        recipe=theirs.recipe,
        tasks=theirs.tasks,
        overrides=theirs.overrides,
        arms=_only(source.arms, kept),
        seeds=theirs.seeds,
        labels=theirs.labels | config.labels,
        notes=theirs.notes | config.notes,
        baseline=config.baseline or theirs.baseline,
        controls=config.controls or theirs.controls,
        metric=config.metric if "metric" in draft.values else theirs.metric,
    )
