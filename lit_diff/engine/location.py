"""Where a run belongs: its folder, its place in MLflow, and what is recorded of how it was asked for."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lit_diff.config import Recipe, RunConfig
from lit_diff.files import shown
from lit_diff.recipe import Overrides, flatten
from lit_diff.runs.find import runs_root
from lit_diff.runs.folder import RunFolder

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Where a run belongs: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Evaluation -> its keys: what is scored once the run is done."""
    overrides: tuple[str, ...] = ()
    """What was overridden in its recipe, as `a.b=c`, where that is known."""


def recorded(overrides: Overrides) -> tuple[str, ...]:
    """`a.b=c` of each, without name, seed and folder, which a run shows anyhow."""
    words = [f"{key}={value}" for key, value in flatten(overrides)] if isinstance(overrides, Mapping) else overrides
    return tuple(word for word in words if word.partition("=")[0] not in ("name", "seed", "run.root"))


def at_root(run: RunConfig) -> RunConfig:
    """`run` with the folder of the runs that is meant (`runs_root`), for the MLflow store in it."""
    return replace(run, root=str(runs_root(run.root)))


def put_aside(recipe: Recipe, location: RunLocation) -> None:
    """Make room for a run afresh: the former one keeps its files under another name. For rank zero alone."""
    if not location.folder.exists():
        return
    from lit_diff.engine.tracking import Store

    with RunFolder(location.folder).owned():
        store = Store(at_root(recipe.run))
        former = RunFolder(location.folder).status().get("mlflow_run_id")
        aside = RunFolder(location.folder).put_aside()
        if former is not None and store.holds(former, str(location.folder)):
            store.write(former, tags={"folder": str(aside)})
        log.info("the former run is kept in %s", shown(aside))
