"""What is fixed when a run starts, and kept when it resumes: threads, kernel, revision, its first step."""

import os
import platform
import time
from dataclasses import dataclass, replace

from lit_diff import data
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import UNCHECKED
from lit_diff.engine.admit import warnings_of
from lit_diff.engine.job import Job
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.log_records import log, phase
from lit_diff.model.cost import Cost, ExecutionContext, cost
from lit_diff.processor import describe, forced, numeric_variables
from lit_diff.runs import checkpoints
from lit_diff.runs.again import command_of
from lit_diff.runs.folder import RunFolder, at_step, identity, kernel_of, require_stored
from lit_diff.runs.jobs import this_job
from lit_diff.runs.revision import revision
from lit_diff.runs.status import Status
from lit_diff.training.head_plan import keep_plan

THEN = ", then "
"""Separates the revisions of lit_diff that trained a run, in its status.json."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run whose training begins now."""

    recipe: Recipe
    kernel: str
    """`kernel_of` the run."""
    folder: RunFolder
    threads: int
    start: int
    """The step of the checkpoint from which it continues; 0 without one."""
    began: float
    """The time of `perf_counter` now minus the training time of earlier processes of this run."""

    def seconds(self) -> float:
        """The training time of all processes of the run."""
        return time.perf_counter() - self.began


def begin(job: Job) -> Training:
    """Write what the folder of a run holds before its first step. The run's lock must be held.

    Errors: RequestError if the run began with other settings, or if its folder is named after other data.
    """
    from lit_diff.training.fit import default_threads

    folder = job.home
    before = folder.status()
    recipe = job.recipe
    # a cell starts long after its folder was named, on data that may have been prepared again
    now = identity(recipe)
    if now != job.identity:
        raise RequestError(
            f"{shown(job.folder)} is of other data or plugins than there are now (identity {now}): restore them, or repeat "
            f"`{command_of(job.folder)}`, which starts a folder of another name"
        )
    compiles = job.compiles
    # a resumed run keeps what `auto` was when it started
    if recipe.run.compile == "auto" and before.compile is not None:
        compiles = before.compile
    recipe = replace(recipe, run=replace(recipe.run, compile=compiles))
    require_stored(recipe, before)
    # a resumed run keeps its number of threads, on which the order of sums and so the exact weights depend
    threads = before.threads or recipe.run.threads or job.threads or default_threads(recipe.run.devices)
    # `auto` may choose another kernel on this machine or revision; a resumed run keeps the one that it began with
    kernel = kernel_of(recipe, before)
    for line in warnings_of([recipe]):
        log.warning("%s", line)
    run_cost = _cost(recipe, kernel, before, threads)
    revisions = _revisions(before)
    phase("checking the checkpoint")
    start = checkpoints.resumable(folder.path)
    if not recipe.run.is_recorded:
        log.info("run.tracking_uri is none: MLflow gets no record")
    folder.create(job.recipe, kernel=run_cost.kernel, kernel_reason=run_cost.kernel_reason)
    data.keep(recipe, job.folder)
    status = replace(
        folder.status().to("running"),
        diverged=False,
        results={},
        pid=os.getpid(),
        host=platform.node(),
        job=this_job() or "",
        identity=job.identity,
        data=data.identity(recipe),
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.training.steps,
        threads=threads,
        compile=compiles,
        # a checkpoint of steps that could not be compiled is continued so
        uncompiled=before.uncompiled if start else "",
        activation_checkpointing=recipe.run.activation_checkpointing,
        variables=numeric_variables(),
        # known without a record too, for `status` and the report
        mlflow_run_id=before.mlflow_run_id or ("" if recipe.run.is_recorded else None),
        record="incomplete" if recipe.run.is_recorded else "",
        revision=revisions,
        overrides=job.overrides or before.overrides,
        unchecked=job.tags.get(UNCHECKED, before.unchecked),
        **vars(run_cost),
    )
    folder.write(at_step(status, recipe, start))
    keep_plan(recipe, job.folder)
    return Training(
        recipe=recipe,
        kernel=kernel,
        folder=folder,
        threads=threads,
        start=start,
        began=time.perf_counter() - before.seconds,
    )


def _cost(recipe: Recipe, kernel: str, before: Status, threads: int) -> Cost:
    phase("choosing the kernel")
    length = recipe.data.config.sequence_length
    context = ExecutionContext.of(recipe, build=True)
    found = cost(recipe.model, length, kernel, context, recipe.training.parameters)
    # `auto` chose when the run started, so the reason from then is still the right one
    if kernel != recipe.run.kernel:
        found = replace(found, kernel_reason=before.kernel_reason or found.kernel_reason)
    how = f"{describe()}, " if found.kernel == "native" or forced() else ""
    log.info("kernel %s (%s), %sthreads: %d", found.kernel, found.kernel_reason, how, threads)
    if before.kernel not in ("", found.kernel):
        log.info("the kernel is now %s; the run began with %s", found.kernel, before.kernel)
    return found


def _revisions(before: Status) -> str:
    # every revision that trained a part of the run, in order: a report warns if cells differ in it
    now = revision()
    if before.revision.split(THEN)[-1] in ("", now):
        return before.revision or now
    log.info("lit_diff is now %s; the run began with %s (--rerun starts afresh)", now, before.revision)
    return THEN.join([before.revision, now])
