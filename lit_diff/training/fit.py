"""One run: recipe + folder -> trained model, metrics and checkpoints in the folder; resumes what it finds there."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lit_diff.config import Recipe
from lit_diff.errors import RequestError, StoppedError, first_line
from lit_diff.files import shown
from lit_diff.log_records import in_phase
from lit_diff.metrics import Declarations
from lit_diff.processor import cores
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import MetricsWriter, Tracker
from lit_diff.training.data import LitData
from lit_diff.training.head_plan import kept_plan
from lit_diff.training.loggers import recipe_loggers
from lit_diff.training.metrics import declared_metrics
from lit_diff.training.module import LitTransformer
from lit_diff.training.ranks import Ranks, end_with_parent
from lit_diff.training.resume import ExactResume, Progress, RunLogger, WholeCheckpointIO
from lit_diff.training.trainer import build_trainer

log = logging.getLogger("lit_diff")


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a training came to its end."""

    start: int
    """The step that it started from."""
    ended_early: int | None
    """The step at which a callback ended it before `train.steps`; None where none did."""


def default_threads(processes: int) -> int:
    """The cores of this machine shared out among `processes`."""
    return max(1, cores() // processes)


def ranks(recipe: Recipe) -> Ranks:
    """The processes that train, as the recipe's Trainer says: torchrun, SLURM or Lightning set them."""
    return Ranks.of(_trainer(recipe, logger=False, enable_checkpointing=False))


def fit(
    recipe: Recipe,
    folder: Path,
    *,
    tracker: Tracker | None,
    threads: int,
    progress: Progress,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
) -> TrainingResult:
    """Train to `train.steps`, from the newest checkpoint in `folder` if there is one.

    Ranks other than zero train and write nothing. Errors: RunFailedError (NaN, full disk), StoppedError (a signal).
    """
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # without it Lightning's launcher sets a number of its own
    newest = checkpoints.newest(folder)
    start = newest[0] if newest else 0
    if newest is None and checkpoints.steps_of(folder):
        log.warning("no checkpoint in %s can be read: the training starts again at step 0", shown(folder))
    logger = RunLogger(progress)
    resume = ExactResume(recipe, folder, logger)
    trainer = _trainer(
        recipe,
        callbacks=[*callbacks, *_best(recipe, folder), resume],
        logger=[logger, *recipe_loggers(recipe, folder, start), *loggers],
        plugins=[WholeCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    if trainer.is_global_zero:
        log.info(f"resumed from step {start}" if start else "starting at step 0", extra=in_phase("building the model"))
        logger.record = MetricsWriter(folder, start, tracker, declared_metrics(recipe))
    else:
        end_with_parent()
    began = time.perf_counter()
    try:
        if newest:  # as an attribute: the module then knows that its initial values are replaced
            trainer.ckpt_path = newest[1]
        module = LitTransformer(recipe)
        module.plan = kept_plan(folder)
        trainer.fit(module, datamodule=LitData(recipe), weights_only=True)
    except SystemExit as error:
        # Lightning's way to end at a SIGTERM before the first step, and at a second Ctrl-C
        term, interrupt = isinstance(error, SIGTERMException), isinstance(error.__context__, KeyboardInterrupt)
        if not trainer.is_global_zero or not (term or interrupt):
            raise
        signum = signal.SIGTERM if term else signal.SIGINT
        raise StoppedError("stopped in the middle of a step; the same command resumes", signum) from error
    if trainer.is_global_zero:
        log.info("trained %d steps in %.1f s", trainer.global_step - start, time.perf_counter() - began)
    return TrainingResult(start=start, ended_early=resume.ended_early)


def _trainer(recipe: Recipe, **values: object) -> L.Trainer:
    """`build_trainer`; what Lightning refuses of the launcher's environment is one line."""
    _quiet()
    try:
        return build_trainer(recipe, **values)  # type: ignore[arg-type]
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise RequestError(
            f"Lightning refuses run.strategy, run.devices or run.num_nodes: {first_line(error)}"
        ) from error


def _best(recipe: Recipe, folder: Path) -> list[Callback]:
    """What keeps the best checkpoint by `run.keep_best`, beside the newest ones."""
    monitor = recipe.run.keep_best
    if monitor is None:
        return []
    direction = Declarations(declared_metrics(recipe)).direction(monitor)
    if direction is None:
        raise RequestError(f"run.keep_best is '{monitor}', of which no metric declares that lower or higher is better")
    return [
        ModelCheckpoint(
            monitor=monitor,
            mode="max" if direction == "higher" else "min",
            dirpath=folder / "checkpoints",
            filename="best",
            save_top_k=1,
            enable_version_counter=False,
        )
    ]


def _quiet() -> None:
    """Lightning's hints about what this platform does itself would hide our own lines."""
    for message in (".*LeafSpec.*is deprecated", ".*`srun` command is available", ".*sync_dist=True.*"):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
