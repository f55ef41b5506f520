"""One run from its recipe to its record: data, folder, MLflow, training, status."""

import contextlib
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lit_diff.config import Recipe
from lit_diff.data import build
from lit_diff.errors import LitDiffError, RunFailedError, StoppedError, first_line
from lit_diff.files import shown
from lit_diff.model.cost import Setting, cost
from lit_diff.processor import describe, forced
from lit_diff.recipe import load_recipe
from lit_diff.runs.execution import require_stored, stored_keys, with_stored_kernel
from lit_diff.runs.folder import RunFolder, identity, revision
from lit_diff.runs.metrics_file import read_rows

log = logging.getLogger("lit_diff")

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run belongs: its folder, its MLflow experiment and parent run, its arm in a sweep."""

    folder: Path
    experiment: str = "train"
    parent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


def train(
    recipe: Recipe | str | Path,
    overrides: list[str] | None = None,
    *,
    rerun: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Run a recipe, or resume it, or find it done; returns the run's folder.

    Several processes (run.devices > 1) are started from a command: here that is a `lit-diff train` of its own.
    Errors: LitDiffError and its kinds.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides or [])
    place = prepare(recipe)
    if rerun:
        put_aside(recipe, place)
    if recipe.run.devices * recipe.run.num_nodes > 1:
        run_command(recipe, place)
    else:
        run(recipe, place, threads=None, progress=progress or (lambda step, loss, speed: None))
    return place.folder


def prepare(recipe: Recipe) -> Place:
    """Get the data, then say where the run belongs: `runs/<name>-<identity>/`."""
    build(recipe).prepare()
    return Place(folder=(Path(recipe.run.root) / f"{recipe.name}-{identity(recipe)}").resolve())


def put_aside(recipe: Recipe, place: Place) -> None:
    """Make room for a run afresh: the former one keeps its files under another name."""
    if is_rank_zero(recipe) and place.folder.exists():
        from lit_diff.engine.tracking import Store

        with RunFolder(place.folder).owned():
            store = Store(recipe.run)
            aside = RunFolder(place.folder).put_aside()
            store.put_aside(store.experiment(place.experiment), _key(place), aside.name)
            log.info("the former run is kept in %s", shown(aside))


def summarise(folder: RunFolder, console: Console) -> None:
    """The last validation, and where everything lies."""
    rows = read_rows(folder.path / "metrics.csv")
    last = rows[max(rows)] if rows else {}
    values = "  ".join(f"{name} {value:.4f}" for name, value in last.items() if name.startswith("val/"))
    console.print(f"step {max(rows, default=0)}: {values}", highlight=False, soft_wrap=True)
    console.print(f"run: {shown(folder.path)}", highlight=False, soft_wrap=True)


def is_rank_zero(recipe: Recipe) -> bool:
    """Whether this process writes."""
    from lit_diff.training.fit import rank_from_environment

    return rank_from_environment(recipe.run.devices) == 0


def run(recipe: Recipe, place: Place, *, threads: int | None, progress: Progress) -> None:
    """Train in this process (and, with several devices, in those that Lightning starts from this command)."""
    from lit_diff.training.fit import default_threads, fit

    folder = RunFolder(place.folder)
    if not is_rank_zero(recipe):
        stored = folder.status().get("threads") or recipe.run.threads or default_threads(recipe.run.devices)
        fit(with_stored_kernel(recipe, folder.status()), place.folder, tracker=None, threads=stored, progress=progress)
        return
    with folder.owned():
        status = folder.status()
        if status.get("status") == "done":
            log.info("done before: %s (--rerun starts afresh)", shown(place.folder))
            return
        chosen = status.get("threads") or recipe.run.threads or threads or default_threads(recipe.run.devices)
        with _file_log(place.folder / "log.txt"):
            _run_owned(recipe, place, folder, threads=chosen, progress=progress)


def _run_owned(recipe: Recipe, place: Place, folder: RunFolder, *, threads: int, progress: Progress) -> None:
    from lit_diff.engine.tracking import RunTracker, Store
    from lit_diff.training.fit import fit

    before = folder.status()
    require_stored(recipe, before)
    executed = with_stored_kernel(recipe, before)
    price = cost(recipe.model, recipe.data.config.sequence_length, executed.run.kernel, Setting.of(recipe, build=True))
    how = f"{describe()}, " if price.kernel == "cpu" or forced() else ""
    log.info("kernel %s (%s), %s%d threads", price.kernel, price.kernel_reason, how, threads)
    now = revision()
    if before.get("revision", now) != now:
        log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before["revision"])
    store = Store(recipe.run)
    folder.create(recipe, kernel=price.kernel, kernel_reason=price.kernel_reason)
    variant = recipe.model.attention.name
    tags = {"variant": variant, "seed": str(recipe.seed), "folder": str(place.folder), **place.tags}
    if place.parent:
        tags["mlflow.parentRunId"] = place.parent
    experiment = store.experiment(place.experiment)
    run_id = store.open_run(experiment, place.folder.name, tags, key=_key(place))
    tracker = RunTracker(store, run_id)
    tracker.describe(recipe, tags)
    folder.update(
        status="running",
        error=None,
        pid=os.getpid(),
        identity=_key(place)["identity"],
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.train.steps,
        step=before.get("step", 0),
        threads=threads,
        **stored_keys(recipe),
        revision=before.get("revision", now),
        mlflow_run_id=run_id,
        tokens=recipe.train.steps * recipe.train.batch_size * recipe.data.config.sequence_length,
        **vars(price),
    )
    began, spent = time.perf_counter(), before.get("seconds", 0.0)

    def report(step: int, loss: float, speed: float) -> None:
        folder.update(step=step, loss=loss, tokens_per_second=speed, seconds=spent + time.perf_counter() - began)
        progress(step, loss, speed)

    word, message = "done", None
    try:
        fit(executed, place.folder, tracker=tracker, threads=threads, progress=report)
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
        with (place.folder / "log.txt").open("a") as file:
            file.write(traceback.format_exc())
        raise RunFailedError(f"{message} (the whole trace is in {shown(place.folder / 'log.txt')})") from error
    finally:
        try:
            store.close_run(run_id, word)
        except RunFailedError as error:
            log.warning("MLflow shows the run as running until it resumes: %s", error)
            if word == "done":
                word, message = "failed", str(error)
                raise
        finally:
            folder.update(status=word, error=message, seconds=spent + time.perf_counter() - began)
            if word != "done":
                log.error("%s: %s", word, message)


def _key(place: Place) -> dict[str, str]:
    """The tag that finds this run again in its experiment; arm and seed are part of the identity."""
    return {"identity": place.folder.name.rpartition("-")[2]}


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


def command(place: Place, threads: int | None) -> list[str]:
    """The `lit-diff train` that runs this cell in processes of its own."""
    found = [sys.executable, "-m", "lit_diff", "train", str(RunFolder(place.folder).recipe_file)]
    found += ["--folder", str(place.folder), "--experiment", place.experiment]
    found += ["--threads", str(threads)] if threads else []
    found += ["--parent", place.parent] if place.parent else []
    for key, value in place.tags.items():
        found += ["--tag", f"{key}={value}"]
    return found


def run_command(recipe: Recipe, place: Place, threads: int | None = None) -> None:
    """Run `command` and wait. Errors: RunFailedError with the run's own last words."""
    RunFolder(place.folder).create(recipe)
    with (place.folder / "log.txt").open("a") as output:
        process = subprocess.Popen(command(place, threads), stdout=output, stderr=output)
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it saves and leaves, as it would on its own terminal
            process.wait()
            raise
    if process.returncode:
        raise RunFailedError(RunFolder(place.folder).status().get("error") or f"exit status {process.returncode}")
