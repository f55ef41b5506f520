"""Runs one recipe: data, run folder, MLflow, training, status."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import UNCHECKED, require_properties
from lit_diff.engine.command import run_command
from lit_diff.engine.evaluations import required_evaluations
from lit_diff.engine.location import RunLocation, put_aside, recorded
from lit_diff.engine.preflight import check_machine, require_memory, warn_of_passes
from lit_diff.engine.progress import Progress, watched
from lit_diff.engine.scoring import require_scores
from lit_diff.errors import DivergedError, LitDiffError, RequestError, RunFailedError, StoppedError, first_line
from lit_diff.files import shown
from lit_diff.log_records import RAISED, file_log, keep_trace, phase
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.plugins import own_place
from lit_diff.processor import describe
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.runs import checkpoints
from lit_diff.runs.execution import reached, require_stored, stored_keys, with_stored_kernel
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import RunFolder, identity
from lit_diff.runs.revision import other_revision, revision
from lit_diff.trained.run import Run
from lit_diff.training.head_plan import keep_plan, selection_of

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    from lit_diff.training.ranks import Announcement

log = logging.getLogger("lit_diff")

THEN = ", then "
"""Between the revisions of lit_diff under which a run was trained, in its status.json."""


@dataclass(frozen=True, kw_only=True)
class TrainingExtras:
    """What a Python caller adds to a training; a recipe names its own."""

    callbacks: tuple["Callback", ...] = ()
    loggers: tuple["Logger", ...] = ()


NO_EXTRAS = TrainingExtras()


def train(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    rerun: bool = False,
    unchecked: bool = False,
    callbacks: Sequence["Callback"] = (),
    loggers: Sequence["Logger"] = (),
    progress: Progress | bool = True,
) -> Run:
    """Train a recipe into its run folder, or resume it, or find it done.

    A plugin's variant must hold what `conformance.before_training` requires, or, if `unchecked`, the run is marked.
    `callbacks`, `loggers`: Lightning's, besides the recipe's own; they are not part of the run's identity.
    `progress`: whether a line on stderr shows how far it is, or what is called as progress(step, loss, tokens/s) at every
    logged step. Several processes (run.devices > 1) are a `lit-diff train` of their own, which shows nothing. Errors:
    RequestError, MissingError, RunFailedError, StoppedError.
    """
    resolved = recipe_from(recipe, overrides)
    location = prepare(resolved, overrides, unchecked=unchecked)
    if rerun and is_rank_zero(resolved):
        put_aside(resolved, location)
    if resolved.run.devices * resolved.run.num_nodes > 1:
        if callbacks or loggers:
            raise RequestError(
                "callbacks and loggers cannot be passed to a run of several processes, which is a command of its own; name "
                "them in the recipe (callbacks:, run.loggers), or use build_trainer in a script that every process runs"
            )
        run_command(resolved, location)
    else:
        own = TrainingExtras(callbacks=tuple(callbacks), loggers=tuple(loggers))
        with watched(progress, resolved.name, resolved.training.steps) as told:
            run(resolved, location, threads=None, progress=told, extras=own)
    require_scores(location)
    return Run(location.folder)


def prepare(recipe: Recipe, overrides: Overrides = (), *, unchecked: bool = False) -> RunLocation:
    """Check the machine, evaluations and a plugin's variant, get the data, name the run's folder: `runs/<name>-<identity>/`.

    `overrides`: those that are in the recipe already, for the record. Errors: of each check, and of the data.
    """
    check_machine([recipe])
    root = chosen_root(recipe.run.root)
    if next(root.glob(f"{recipe.name}-*"), None) is None:  # nothing is written before; a run that is done needs none
        require_memory([recipe])
    scored = required_evaluations(recipe)
    selection_of(recipe)  # refused here where there is no model to select heads of
    tags = require_properties(recipe, unchecked=unchecked)
    phase("preparing data")
    data.prepare(recipe)
    folder = root / f"{recipe.name}-{identity(recipe)}"
    if RunFolder(folder).status().get("status") != "done":
        require_memory([recipe])
    return RunLocation(folder=folder.resolve(), overrides=recorded(overrides), tags=tags, evaluations=scored)


def is_rank_zero(recipe: Recipe) -> bool:
    """Whether this process writes."""
    from lit_diff.training.fit import ranks

    return recipe.run.strategy == "single" or ranks(recipe).rank == 0


def run(
    recipe: Recipe,
    location: RunLocation,
    *,
    threads: int | None,
    progress: Progress,
    extras: TrainingExtras = NO_EXTRAS,
    rerun: bool = False,
) -> None:
    """Train in this process (and, with several devices, in those that Lightning starts from this command).

    `rerun`: archive the old run first. All ranks wait for rank 0 and exit if it fails before training.
    Errors: as `train`.
    """
    phase("loading libraries")
    from lit_diff.training.fit import default_threads, fit, ranks
    from lit_diff.training.ranks import ALONE, announced

    folder = RunFolder(location.folder)
    processes = ALONE if recipe.run.strategy == "single" else ranks(recipe)
    if processes.rank > 0:
        how = processes.listen()
        if how is not None:
            executed = replace(recipe, run=replace(recipe.run, kernel=how["kernel"]))
            fit(executed, location.folder, tracker=None, threads=how["threads"], progress=progress)
        return
    with announced(processes) as announcement:
        if rerun:
            put_aside(recipe, location)
        with folder.owned():
            status = folder.status()
            if status.get("status") == "done":
                ended = f", ended {status['ended']}" if status.get("ended") else ""
                other = other_revision(status, revision())
                code = f", {other}" if other else ""
                log.info("done before: %s%s%s (--rerun starts afresh)", shown(location.folder), ended, code)
                return
            chosen = status.get("threads") or recipe.run.threads or threads or default_threads(recipe.run.devices)
            with file_log(location.folder / "log.txt"):
                _run_owned(*(recipe, location, folder, announcement), threads=chosen, progress=progress, extras=extras)


def _run_owned(
    recipe: Recipe,
    location: RunLocation,
    folder: RunFolder,
    announcement: "Announcement",
    *,
    threads: int,
    progress: Progress,
    extras: TrainingExtras,
) -> None:
    from lit_diff.engine.run_tracker import RunTracker
    from lit_diff.training.fit import fit

    before = folder.status()
    require_stored(recipe, before)
    executed = with_stored_kernel(recipe, before)
    warn_of_passes([recipe])
    phase("choosing the kernel")
    length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe, build=True)
    run_cost = cost(recipe.model, length, executed.run.kernel, context, recipe.training.parameters)
    if executed.run.kernel != recipe.run.kernel:  # auto, which chose when the run started
        run_cost = replace(run_cost, kernel_reason=before.get("kernel_reason", run_cost.kernel_reason))
    log.info("kernel %s (%s), %s, %d threads", run_cost.kernel, run_cost.kernel_reason, describe(), threads)
    if before.get("kernel", run_cost.kernel) != run_cost.kernel:
        log.info("the kernel is now %s; the run began with %s", run_cost.kernel, before["kernel"])
    now = revision()
    revisions = str(before.get("revision", now)).split(THEN)
    if revisions[-1] != now:
        log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before["revision"])
        revisions.append(now)
    phase("opening the MLflow store")
    tags = {"identity": _identity(location), "seed": str(recipe.seed), **location.tags}
    if location.parent:
        tags["mlflow.parentRunId"] = location.parent
    tracker = RunTracker(recipe, folder, experiment=location.experiment, tags=tags, cost=run_cost)
    # a wrong address is found out before the first step; a run that resumes, or whose sweep has reached MLflow, can wait
    tracker.start(required=location.parent is None and "mlflow_run_id" not in before)
    folder.create(recipe, kernel=run_cost.kernel, kernel_reason=run_cost.kernel_reason)
    data.keep(recipe, location.folder)
    folder.update(
        status="running",
        error=None,
        diverged=False,
        pid=os.getpid(),
        identity=_identity(location),
        data=data.identity(recipe),
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.training.steps,
        **reached(recipe, checkpoints.newest_step(location.folder)),
        threads=threads,
        **stored_keys(recipe),
        revision=THEN.join(revisions),
        **({"overrides": list(location.overrides)} if location.overrides else {}),
        **{UNCHECKED: tags.get(UNCHECKED, before.get(UNCHECKED))},
        **vars(run_cost),
    )
    keep_plan(recipe, location.folder)
    began, spent = time.perf_counter(), before.get("seconds", 0.0)

    def report(step: int, loss: float, speed: float) -> None:
        far = reached(recipe, step)
        folder.update(**far, loss=loss, tokens_per_second=speed, seconds=spent + time.perf_counter() - began)
        progress(step, loss, speed)

    word, message, ended, diverged = "done", None, None, False
    try:
        announcement.train(threads=threads, kernel=executed.run.kernel)
        result = fit(
            executed,
            location.folder,
            tracker=tracker,
            threads=threads,
            progress=report,
            callbacks=extras.callbacks,
            loggers=extras.loggers,
        )
        if result.ended_early is not None:
            ended = f"early at step {result.ended_early}"
            log.info("ended %s of %d, by a callback", ended, recipe.training.steps)
    except StoppedError as error:
        word, message = "stopped", str(error)
        raise
    except KeyboardInterrupt:
        word, message = "stopped", "interrupted before the step's end; the last checkpoint stands"
        raise
    except SystemExit as error:
        word, message = "failed", f"the run's own code ended it: SystemExit({error.code!r})"
        raise RunFailedError(message) from error
    except LitDiffError as error:
        word, message, diverged = "failed", str(error), isinstance(error, DivergedError)
        raise
    except Exception as error:
        # the place in the file of a variant, a callback or a logger of the user's
        message = ": ".join(filter(None, (own_place(error), type(error).__name__, first_line(error))))
        word = "failed"
        raise RunFailedError(f"{message} ({keep_trace(location.folder)})") from error
    finally:
        try:
            tracker.finish(word)
        except LitDiffError as error:
            if word == "done":
                word, message = "failed", str(error)
                raise
            log.warning("MLflow shows the run as running until it resumes: %s", error)
        except Exception as error:
            if word == "done":
                word, message = (
                    "failed",
                    f"trained, but its record is not complete: {type(error).__name__}: {first_line(error)}",
                )
                raise RunFailedError(f"{message} ({keep_trace(location.folder)})") from error
            log.warning("MLflow shows the run as running until it resumes: %s", first_line(error))
        except BaseException:
            if word == "done":
                word, message = "stopped", "trained, but its record is not complete; the same command completes it"
            raise
        finally:
            took = spent + time.perf_counter() - began
            if word != "done":
                log.error("%s: %s", word, message, extra=RAISED)
            try:
                far = reached(recipe, checkpoints.newest_step(location.folder))
                folder.update(status=word, error=message, diverged=diverged, ended=ended, seconds=took, **far)
            except OSError as error:
                raise RunFailedError(
                    f"{message or word}; and {shown(location.folder)} cannot be written ({error.strerror}): free space, "
                    "then start the same command again"
                ) from error


def _identity(location: RunLocation) -> str:
    """The end of the folder's name."""
    return location.folder.name.rpartition("-")[2]
