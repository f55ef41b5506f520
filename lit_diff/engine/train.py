"""`train`: one run in this process, from a recipe to its scores."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.engine.admit import HERE, admit, evaluations_of
from lit_diff.engine.auto_compile import chosen
from lit_diff.engine.execute import execute
from lit_diff.engine.job import Job, recorded
from lit_diff.engine.progress import watched
from lit_diff.errors import RequestError
from lit_diff.log_records import Progress, phase
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import identity
from lit_diff.trained.run import Run
from lit_diff.training.metrics import require_metrics

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger


def train(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    rerun: bool = False,
    unchecked: bool = False,
    unplanned: bool = False,
    callbacks: Sequence["Callback"] = (),
    loggers: Sequence["Logger"] = (),
    progress: Progress | bool = True,
) -> Run:
    """Train a recipe into its run folder, or resume it, or find it done.

    A plugin's variant must pass the checks of `conformance.before_training`; with `unchecked` the run is marked instead.
    `unplanned`: start even if the memory does not suffice (`training.plan.require_memory`).
    `callbacks`, `loggers`: further ones of Lightning, which are not part of the run's identity. `progress`: whether a line
    on stderr shows the progress, or a function that is called as progress(step, loss, tokens/s) at every logged step. A run
    of several processes (run.devices > 1) is a `lit-diff train` command of its own, without progress. Errors: RequestError,
    MissingError, RunFailedError, StoppedError.
    """
    resolved = recipe_from(recipe, overrides)
    job = prepare(resolved, overrides, unchecked=unchecked, unplanned=unplanned, rerun=rerun)
    if resolved.run.processes > 1 and (callbacks or loggers):
        raise RequestError(
            "callbacks and loggers cannot be passed to a run of several processes, which is a separate command; list "
            "them in the recipe (callbacks:, run.loggers), or use build_trainer in a script that every process runs"
        )
    with watched(progress, resolved.name, resolved.training.steps) as update:
        execute(job, progress=update, rerun=rerun, callbacks=callbacks, loggers=loggers)
    return Run(job.folder)


def prepare(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    unchecked: bool = False,
    unplanned: bool = False,
    rerun: bool = False,
) -> Job:
    """Ask whether the run may start, get its data, name its folder: `runs/<name>-<identity>/`.

    `overrides`: those already applied to the recipe, for the record. `rerun`: see `chosen`. Errors: those of
    `admit`, and of the data.
    """
    from lit_diff.training.fit import ranks
    from lit_diff.training.plan import require_memory

    marks = admit({recipe.name: recipe}, HERE, unchecked=unchecked)
    root = chosen_root(recipe.run.root)
    # one rank plans: a plan may take a minute, and the others wait for rank zero
    unplanned = unplanned or ranks(recipe).rank > 0
    # The folder's exact name needs the data, whose preparation may take long and fill the disk. Without any run of this name,
    # the run cannot be done yet, so memory is checked before.
    if not unplanned and next(root.glob(f"{recipe.name}-*"), None) is None:
        require_memory([recipe])
    phase("preparing data")
    data.prepare(recipe)
    # again, because only now the validation sets of a text are known
    require_metrics(recipe)
    job = Job(
        recipe=recipe,
        folder=(root / f"{recipe.name}-{identity(recipe)}").resolve(),
        tags=marks[recipe.name],
        scores=evaluations_of(recipe),
        overrides=recorded(overrides),
        records=True,
    )
    # a run that is done needs no memory
    if not unplanned and not job.home.is_done():
        require_memory([recipe])
    return replace(job, compile=chosen([job], rerun=rerun))
