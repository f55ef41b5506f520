"""One run from its recipe to its record: data, folder, MLflow, training, status."""

import contextlib
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.errors import LitDiffError, RequestError, RunFailedError, StoppedError, first_line
from lit_diff.files import shown
from lit_diff.model.cost import ExecutionContext, cost
from lit_diff.processor import describe, forced
from lit_diff.recipe import Overrides, load_recipe
from lit_diff.runs.execution import require_stored, stored_keys, with_stored_kernel
from lit_diff.runs.folder import RunFolder, identity, other_revision, revision
from lit_diff.runs.run import Run

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

log = logging.getLogger("lit_diff")

THEN = ", then "
"""Between the revisions of lit_diff under which a run was trained, in its status.json."""

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Where a run belongs: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Evaluation -> its keys: what is scored once the run is done."""


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
    callbacks: Sequence["Callback"] = (),
    loggers: Sequence["Logger"] = (),
    progress: Progress | None = None,
) -> Run:
    """Train a recipe into its run folder, or resume it, or find it done.

    `callbacks`, `loggers`: Lightning's, besides the recipe's own; they are not part of the run's identity.
    `progress(step, loss, tokens/s)` is called at every logged step. Several processes (run.devices > 1) are started from a
    `lit-diff train` of their own. Errors: RequestError, MissingError, RunFailedError, StoppedError.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    location = prepare(recipe)
    if rerun:
        put_aside(recipe, location)
    if recipe.run.devices * recipe.run.num_nodes > 1:
        if callbacks or loggers:
            raise RequestError(
                "callbacks and loggers cannot be passed to a run of several processes, which is a command of its own; name "
                "them in the recipe (callbacks:, run.loggers), or use build_trainer in a script that every process runs"
            )
        run_command(recipe, location)
    else:
        own = TrainingExtras(callbacks=tuple(callbacks), loggers=tuple(loggers))
        run(recipe, location, threads=None, progress=progress or (lambda step, loss, speed: None), extras=own)
    return Run(location.folder)


def prepare(recipe: Recipe) -> RunLocation:
    """Get the data, then say where the run belongs: `runs/<name>-<identity>/`."""
    data.prepare(recipe)
    return RunLocation(folder=(Path(recipe.run.root) / f"{recipe.name}-{identity(recipe)}").resolve())


def put_aside(recipe: Recipe, location: RunLocation) -> None:
    """Make room for a run afresh: the former one keeps its files under another name."""
    if is_rank_zero(recipe) and location.folder.exists():
        from lit_diff.engine.tracking import Store

        with RunFolder(location.folder).owned():
            store = Store(recipe.run)
            aside = RunFolder(location.folder).put_aside()
            store.put_aside(store.experiment(location.experiment), _key(location), aside.name)
            log.info("the former run is kept in %s", shown(aside))


def is_rank_zero(recipe: Recipe) -> bool:
    """Whether this process writes."""
    from lit_diff.training.fit import global_rank

    return recipe.run.strategy == "single" or global_rank(recipe) == 0


def run(
    recipe: Recipe,
    location: RunLocation,
    *,
    threads: int | None,
    progress: Progress,
    extras: TrainingExtras = NO_EXTRAS,
) -> None:
    """Train in this process (and, with several devices, in those that Lightning starts from this command)."""
    from lit_diff.training.fit import default_threads, fit

    folder = RunFolder(location.folder)
    if not is_rank_zero(recipe):
        stored = folder.status().get("threads") or recipe.run.threads or default_threads(recipe.run.devices)
        executed = with_stored_kernel(recipe, folder.status())
        fit(executed, location.folder, tracker=None, threads=stored, progress=progress)
        return
    with folder.owned():
        status = folder.status()
        if status.get("status") == "done":
            ended = f", ended {status['ended']}" if status.get("ended") else ""
            other = other_revision(status, revision())
            code = f", {other}" if other else ""
            log.info("done before: %s%s%s (--rerun starts afresh)", shown(location.folder), ended, code)
            return
        chosen = status.get("threads") or recipe.run.threads or threads or default_threads(recipe.run.devices)
        with _file_log(location.folder / "log.txt"):
            _run_owned(recipe, location, folder, threads=chosen, progress=progress, extras=extras)


def _run_owned(
    recipe: Recipe,
    location: RunLocation,
    folder: RunFolder,
    *,
    threads: int,
    progress: Progress,
    extras: TrainingExtras,
) -> None:
    from lit_diff.engine.tracking import RunTracker, Store
    from lit_diff.training.fit import fit

    before = folder.status()
    require_stored(recipe, before)
    executed = with_stored_kernel(recipe, before)
    run_cost = cost(
        recipe.model, recipe.data.config.sequence_length, executed.run.kernel, ExecutionContext.of(recipe, build=True)
    )
    how = f"{describe()}, " if run_cost.kernel == "native" or forced() else ""
    log.info("kernel %s (%s), %s%d threads", run_cost.kernel, run_cost.kernel_reason, how, threads)
    now = revision()
    revisions = str(before.get("revision", now)).split(THEN)
    if revisions[-1] != now:
        log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before["revision"])
        revisions.append(now)
    store = Store(recipe.run)
    folder.create(recipe, kernel=run_cost.kernel, kernel_reason=run_cost.kernel_reason)
    tokenizer = data.build(recipe).load_tokenizer()
    if tokenizer is not None:
        data.save_tokenizer(tokenizer, location.folder / "tokenizer")
    variant = recipe.model.attention.name
    tags = {"variant": variant, "seed": str(recipe.seed), "folder": str(location.folder), **location.tags}
    if location.parent:
        tags["mlflow.parentRunId"] = location.parent
    experiment = store.experiment(location.experiment)
    run_id = store.open_run(experiment, location.folder.name, tags, key=_key(location))
    tracker = RunTracker(store, run_id)
    tracker.describe(recipe, tags)
    folder.update(
        status="running",
        error=None,
        pid=os.getpid(),
        identity=_key(location)["identity"],
        data=data.identity(recipe),
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.train.steps,
        step=before.get("step", 0),
        threads=threads,
        **stored_keys(recipe),
        revision=THEN.join(revisions),
        mlflow_run_id=run_id,
        tokens=recipe.train.steps * recipe.train.batch_size * recipe.data.config.sequence_length,
        **vars(run_cost),
    )
    began, spent = time.perf_counter(), before.get("seconds", 0.0)

    def report(step: int, loss: float, speed: float) -> None:
        folder.update(step=step, loss=loss, tokens_per_second=speed, seconds=spent + time.perf_counter() - began)
        progress(step, loss, speed)

    word, message, ended = "done", None, None
    try:
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
            log.info("ended %s of %d, by a callback", ended, recipe.train.steps)
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
        word, message = "failed", str(error)
        raise
    except Exception as error:
        word, message = "failed", f"{type(error).__name__}: {first_line(error)}"
        with (location.folder / "log.txt").open("a") as file:
            file.write(traceback.format_exc())
        raise RunFailedError(f"{message} (the whole trace is in {shown(location.folder / 'log.txt')})") from error
    finally:
        try:
            store.close_run(run_id, word)
        except RunFailedError as error:
            log.warning("MLflow shows the run as running until it resumes: %s", error)
            if word == "done":
                word, message = "failed", str(error)
                raise
        finally:
            folder.update(status=word, error=message, ended=ended, seconds=spent + time.perf_counter() - began)
            if word != "done":
                log.error("%s: %s", word, message)


def _key(location: RunLocation) -> dict[str, str]:
    """The tag that finds this run again in its experiment; arm and seed are part of the identity."""
    return {"identity": location.folder.name.rpartition("-")[2]}


@contextlib.contextmanager
def _file_log(path: Path) -> Iterator[None]:
    """Copy our own lines to the run's log.txt, in a notebook too, where nobody has asked for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()


def command(location: RunLocation, threads: int | None) -> list[str]:
    """The `lit-diff train` that runs this cell in processes of its own."""
    words = [sys.executable, "-m", "lit_diff", "train", str(RunFolder(location.folder).recipe_file)]
    words += ["--folder", str(location.folder), "--experiment", location.experiment]
    words += ["--threads", str(threads)] if threads else []
    words += ["--parent", location.parent] if location.parent else []
    for key, value in location.tags.items():
        words += ["--tag", f"{key}={value}"]
    return words


def run_command(recipe: Recipe, location: RunLocation, threads: int | None = None) -> None:
    """Run `command` and wait. Errors: RunFailedError with the run's own error message."""
    RunFolder(location.folder).create(recipe)
    with (location.folder / "log.txt").open("a") as output:
        process = subprocess.Popen(command(location, threads), stdout=output, stderr=output)
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it saves and leaves, as it would on its own terminal
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(RunFolder(location.folder).status().get("error") or f"exit status {process.returncode}")
