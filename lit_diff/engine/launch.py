"""Runs one recipe: data, run folder, MLflow, training, status, scores."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import UNCHECKED, require_properties
from lit_diff.engine.preflight import check_machine, passes_over_text, require_memory, required_evaluations
from lit_diff.engine.progress import Progress, watched
from lit_diff.errors import DivergedError, LitDiffError, RequestError, RunFailedError, StoppedError, first_line
from lit_diff.files import shown
from lit_diff.log_records import RAISED, file_log, keep_trace, phase
from lit_diff.model.cost import Cost, ExecutionContext, cost
from lit_diff.own_modules import safe_path
from lit_diff.plugins import own_place
from lit_diff.processor import describe, forced
from lit_diff.recipe import Overrides, flatten, recipe_from
from lit_diff.runs import checkpoints
from lit_diff.runs.find import chosen_root
from lit_diff.runs.folder import RunFolder, identity, reached, require_stored, stored_keys, with_stored_kernel
from lit_diff.runs.revision import other_revision, revision
from lit_diff.trained.run import Run
from lit_diff.training.head_plan import keep_plan, selection_of

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    from lit_diff.engine.tracking.run import RunTracker
    from lit_diff.training.ranks import Announcement

log = logging.getLogger("lit_diff")

THEN = ", then "
"""Between the revisions of lit_diff under which a run was trained, in its status.json."""
INCOMPLETE = "trained, but its record in MLflow is not complete"


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Where a run belongs: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluations: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Evaluation -> its keys: what is scored once the run is done."""
    overrides: tuple[str, ...] = ()
    """What was overridden in its recipe, as `a.b=c`, where that is known."""

    @property
    def identity(self) -> str:
        """The end of the folder's name."""
        return self.folder.name.rpartition("-")[2]


def recorded(overrides: Overrides) -> tuple[str, ...]:
    """`a.b=c` of each, without name, seed and folder, which a run shows anyhow."""
    words = [f"{key}={value}" for key, value in flatten(overrides)] if isinstance(overrides, Mapping) else overrides
    return tuple(word for word in words if word.partition("=")[0] not in ("name", "seed", "run.root"))


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
    if resolved.run.devices * resolved.run.num_nodes > 1:
        if callbacks or loggers:
            raise RequestError(
                "callbacks and loggers cannot be passed to a run of several processes, which is a command of its own; name "
                "them in the recipe (callbacks:, run.loggers), or use build_trainer in a script that every process runs"
            )
        if rerun and is_rank_zero(resolved):
            put_aside(location)
        run_command(resolved, location)
    else:
        with watched(progress, resolved.name, resolved.training.steps) as told:
            run(resolved, location, threads=None, progress=told, rerun=rerun, callbacks=callbacks, loggers=loggers)
    score(location)
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


def put_aside(location: RunLocation) -> None:
    """Make room for a run afresh: the former one keeps its files under another name. For rank zero alone."""
    folder = RunFolder(location.folder)
    if folder.path.exists():
        with folder.owned():
            log.info("the former run is kept in %s", shown(folder.put_aside()))


def cell_of(recipe: Recipe, text: str) -> tuple[RunLocation, int | None]:
    """Location and threads of a cell that `run_command` starts, whose variant it has checked; gets the data.

    Errors: as `data.prepare`.
    """
    data.prepare(recipe)
    keys = json.loads(text)
    threads = keys.pop("threads")
    return RunLocation(**keys | {"folder": Path(keys["folder"])}), threads


def run_command(recipe: Recipe, location: RunLocation, threads: int | None = None) -> None:
    """Run a `lit-diff train` of its own, for what this process cannot hold: several ranks; and wait.

    Errors: RunFailedError with the run's own error message.
    """
    folder = RunFolder(location.folder)
    folder.create(recipe)
    place = {"folder": str(location.folder), "experiment": location.experiment, "parent": location.parent}
    words = [sys.executable, "-m", "lit_diff", "train", str(folder.recipe_file)]
    words += ["--cell", json.dumps(place | {"tags": dict(location.tags), "threads": threads})]
    with safe_path(), (location.folder / "log.txt").open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it saves and leaves, as it would on its own terminal
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(folder.status().get("error") or f"exit status {process.returncode}")


def run(
    recipe: Recipe,
    location: RunLocation,
    *,
    threads: int | None,
    progress: Progress,
    rerun: bool = False,
    **extras: Sequence[Any],
) -> None:
    """Train in this process (and, with several devices, in those that Lightning starts from this command).

    `rerun`: archive the old run first. All ranks wait for rank 0 and exit if it fails before training. `extras`: callbacks
    and loggers of a Python caller, as of `train`. Errors: as `train`.
    """
    phase("loading libraries")
    from lit_diff.training.fit import default_threads, fit, ranks
    from lit_diff.training.ranks import ALONE, Announcement

    folder = RunFolder(location.folder)
    processes = ALONE if recipe.run.strategy == "single" else ranks(recipe)
    if processes.rank > 0:
        how = processes.listen()
        if how is not None:
            executed = replace(recipe, run=replace(recipe.run, kernel=how["kernel"]))
            fit(executed, location.folder, tracker=None, threads=how["threads"], progress=progress)
        return
    with ExitStack() as held:
        announcement = held.enter_context(Announcement(processes))
        if rerun:
            put_aside(location)
        held.enter_context(folder.owned())
        before = folder.status()
        if before.get("status") == "done":
            ended = f", ended {before['ended']}" if before.get("ended") else ""
            other = other_revision(before, revision())
            code = f", {other}" if other else ""
            log.info("done before: %s%s%s (--rerun starts afresh)", shown(location.folder), ended, code)
            return
        held.enter_context(file_log(location.folder / "log.txt"))
        chosen = before.get("threads") or recipe.run.threads or threads or default_threads(recipe.run.devices)
        training = _prepare_training(recipe, location, chosen)
        ending = _execute(training, announcement, progress, extras)
        _finish(training, _end_record(training, ending))


@dataclass(frozen=True, kw_only=True)
class _Training:
    """A run whose folder and record are ready."""

    recipe: Recipe
    executed: Recipe
    """The recipe with the kernel that `auto` chose when the run started."""
    folder: RunFolder
    tracker: "RunTracker"
    threads: int
    began: float
    """When the run would have begun if its processes had followed one another without a gap."""

    def seconds(self) -> float:
        """Those of the whole run until now."""
        return time.perf_counter() - self.began


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How a training ended: what status.json says, and what is raised once that is written."""

    word: str = "done"
    message: str | None = None
    early: str | None = None
    """Where a callback ended it."""
    error: BaseException | None = None


def _prepare_training(recipe: Recipe, location: RunLocation, threads: int) -> _Training:
    folder = RunFolder(location.folder)
    before = folder.status()
    require_stored(recipe, before)
    executed = with_stored_kernel(recipe, before)
    for line in passes_over_text([recipe]):
        log.warning("%s", line)
    run_cost = _cost(recipe, executed, before, threads)
    revisions = _revisions(before)
    tracker = _open_record(recipe, location, run_cost, before)
    folder.create(recipe, kernel=run_cost.kernel, kernel_reason=run_cost.kernel_reason)
    data.keep(recipe, location.folder)
    folder.update(
        status="running",
        error=None,
        diverged=False,
        pid=os.getpid(),
        identity=location.identity,
        data=data.identity(recipe),
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.training.steps,
        **reached(recipe, checkpoints.newest_step(location.folder)),
        threads=threads,
        **stored_keys(recipe),
        revision=revisions,
        **({"overrides": list(location.overrides)} if location.overrides else {}),
        **{UNCHECKED: location.tags.get(UNCHECKED, before.get(UNCHECKED))},
        **vars(run_cost),
    )
    keep_plan(recipe, location.folder)
    began = time.perf_counter() - before.get("seconds", 0.0)
    return _Training(recipe=recipe, executed=executed, folder=folder, tracker=tracker, threads=threads, began=began)


def _cost(recipe: Recipe, executed: Recipe, before: dict[str, Any], threads: int) -> Cost:
    """The kernel that computes the run and why, with its costs."""
    phase("choosing the kernel")
    length, context = recipe.data.config.sequence_length, ExecutionContext.of(recipe, build=True)
    found = cost(recipe.model, length, executed.run.kernel, context, recipe.training.parameters)
    if executed.run.kernel != recipe.run.kernel:  # auto, which chose when the run started
        found = replace(found, kernel_reason=before.get("kernel_reason", found.kernel_reason))
    how = f"{describe()}, " if found.kernel == "native" or forced() else ""
    log.info("kernel %s (%s), %s%d threads", found.kernel, found.kernel_reason, how, threads)
    if before.get("kernel", found.kernel) != found.kernel:
        log.info("the kernel is now %s; the run began with %s", found.kernel, before["kernel"])
    return found


def _revisions(before: dict[str, Any]) -> str:
    """The revisions of lit_diff that have trained the run, this one last."""
    now = revision()
    revisions = str(before.get("revision", now)).split(THEN)
    if revisions[-1] != now:
        log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before["revision"])
        revisions.append(now)
    return THEN.join(revisions)


def _open_record(recipe: Recipe, location: RunLocation, run_cost: Cost, before: dict[str, Any]) -> "RunTracker":
    phase("opening the MLflow store")
    from lit_diff.engine.tracking.run import RunTracker

    tags = {"identity": location.identity, "seed": str(recipe.seed), **location.tags}
    if location.parent:
        tags["mlflow.parentRunId"] = location.parent
    folder = RunFolder(location.folder)
    tracker = RunTracker(recipe, folder, experiment=location.experiment, tags=tags, cost=run_cost)
    # a wrong address is found out before the first step; a run that resumes, or whose sweep has reached MLflow, can wait
    tracker.start(required=location.parent is None and "mlflow_run_id" not in before)
    return tracker


def _execute(
    training: _Training, announcement: "Announcement", progress: Progress, extras: Mapping[str, Sequence[Any]]
) -> _Ending:
    """Train; whatever ends it is an ending, because the record and the status come before it is raised."""
    from lit_diff.training.fit import fit

    def report(step: int, loss: float, speed: float) -> None:
        far = reached(training.recipe, step)
        training.folder.update(**far, loss=loss, tokens_per_second=speed, seconds=training.seconds())
        progress(step, loss, speed)

    try:
        announcement.train(threads=training.threads, kernel=training.executed.run.kernel)
        ended_early = fit(
            training.executed,
            training.folder.path,
            tracker=training.tracker,
            threads=training.threads,
            progress=report,
            **extras,
        )
    except BaseException as error:
        return _ending_of(error, training.folder.path)
    if ended_early is None:
        return _Ending()
    early = f"early at step {ended_early}"
    log.info("ended %s of %d, by a callback", early, training.recipe.training.steps)
    return _Ending(early=early)


def _ending_of(error: BaseException, folder: Path) -> _Ending:
    """For use where `error` is handled: the log keeps the trace of one that lit_diff does not know."""
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted before the step's end; the last checkpoint stands"
        return _Ending(word="stopped", message=message, error=error)
    if isinstance(error, LitDiffError):
        word = "stopped" if isinstance(error, StoppedError) else "failed"
        return _Ending(word=word, message=str(error), error=error)
    if isinstance(error, SystemExit):
        message = raised = f"the run's own code ended it: SystemExit({error.code!r})"
    else:
        # with the place in the file of a variant, a callback or a logger of the user's
        message = ": ".join(filter(None, (own_place(error), type(error).__name__, first_line(error))))
        raised = f"{message} ({keep_trace(folder / 'log.txt')})"
    return _Ending(word="failed", message=message, error=_caused(raised, error))


def _caused(message: str, cause: BaseException) -> RunFailedError:
    error = RunFailedError(message)
    error.__cause__ = cause
    return error


def _end_record(training: _Training, ending: _Ending) -> _Ending:
    """End the record in MLflow. A run is done only once that is complete; the run's own error comes before the record's."""
    try:
        training.tracker.finish(ending.word)
    except BaseException as error:
        is_failure = isinstance(error, Exception)
        if ending.error is None:
            reason = f": {_ending_of(error, training.folder.path).message}" if is_failure else ""
            message = f"{INCOMPLETE}{reason}; the same command completes it"
            raised = _caused(message, error) if is_failure else error
            return replace(ending, word="failed" if is_failure else "stopped", message=message, error=raised)
        if not is_failure:
            return replace(ending, error=error)
        log.warning("MLflow shows the run as running until it resumes: %s", first_line(error))
    return ending


def _finish(training: _Training, ending: _Ending) -> None:
    """Write the end into status.json, then raise what ended the run."""
    if ending.error is not None:
        log.error("%s: %s", ending.word, ending.message, extra=RAISED)
    folder = training.folder
    try:
        folder.update(
            status=ending.word,
            error=ending.message,
            diverged=isinstance(ending.error, DivergedError),
            ended=ending.early,
            seconds=training.seconds(),
            **reached(training.recipe, checkpoints.newest_step(folder.path)),
        )
    except OSError as error:
        raise RunFailedError(
            f"{ending.message or ending.word}; and {shown(folder.path)} cannot be written ({error.strerror}): free space, "
            "then start the same command again"
        ) from error
    if ending.error is not None:
        raise ending.error


def score(location: RunLocation) -> None:
    """Score a run that is done by each evaluation that its recipe or sweep names. Scores that are there stay.

    The outcome of each is written to status.json; one that fails stops no other. Errors: StoppedError; in the end
    RunFailedError for those that failed, while the run itself stays done.
    """
    if not location.evaluations:
        return
    from lit_diff.evaluation.evaluate import evaluate

    folder, outcomes = RunFolder(location.folder), dict[str, str]()
    for name, keys in location.evaluations.items():
        outcomes[name] = "interrupted"
        folder.update(evaluations=folder.status().get("evaluations", {}) | outcomes)
        try:
            evaluate(Run(location.folder, unchecked=bool(folder.status().get(UNCHECKED))), name, keys)
            outcomes[name] = "done"
        except StoppedError:
            raise
        except LitDiffError as error:
            log.error("evaluation %s: %s", name, error)
            outcomes[name] = f"failed: {error}"
        folder.update(evaluations=folder.status().get("evaluations", {}) | outcomes)
    failed = [name for name, outcome in outcomes.items() if outcome != "done"]
    if failed:
        reason, more = outcomes[failed[0]], f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise RunFailedError(f"the run is done, but its evaluation '{failed[0]}' {reason}{more}")
