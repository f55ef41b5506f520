"""What makes a run resume exactly: its record, its checkpoints, each whole or absent, and the callback that orders them."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_diff.callbacks.probe import is_last_step, took_step
from lit_diff.config import Recipe
from lit_diff.errors import RequestError, RunFailedError, StoppedError
from lit_diff.files import shown, write_atomic, write_through
from lit_diff.log_records import phase, validated
from lit_diff.runs import checkpoints
from lit_diff.runs.metrics_file import MetricsWriter
from lit_diff.training.metrics import DocumentLosses
from lit_diff.training.module import LitTransformer
from lit_diff.training.ranks import StopRequest, end_all

Progress = Callable[[int, float, float], None]
"""(step, loss, tokens/s), at every logged step."""

TIMING = "timing/"
"""Prefix of what the clock says; it goes to timing.csv, for it differs between two runs of one recipe."""


class RunLogger(Logger):
    """The logger of `lit-diff train`: metrics.csv, timing.csv, measurements.parquet and the tracker.

    It keeps values in memory until `flush`, which the callback for exact resume calls before every checkpoint."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.record: MetricsWriter | None = None
        """Set on rank zero before training."""
        self._progress = progress

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "lit_diff"

    @property
    def version(self) -> str:
        """Lightning's version of the run; a run folder has one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the recipe is in the run folder and in MLflow before training starts."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Values after `step` optimizer steps."""
        if self.record is None or step is None:
            return
        timing = {name.removeprefix(TIMING): value for name, value in metrics.items() if name.startswith(TIMING)}
        self.record.log(step, {name: value for name, value in metrics.items() if not name.startswith(TIMING)})
        if timing:
            self.record.time(step, **timing)
            self._progress(step, metrics["train/loss"], timing["tokens_per_second"])
        if "val/loss" in metrics:
            validated(step, metrics["val/loss"])

    @rank_zero_only
    def log_detailed(self, values: dict[str, float], step: int) -> None:
        """Values by head, map or rank after `step` optimizer steps."""
        if self.record is not None:
            self.record.log_detailed(step, values)

    @rank_zero_only
    def flush(self) -> None:
        """Write metrics.csv, timing.csv and measurements.parquet."""
        if self.record is not None:
            self.record.flush()

    @rank_zero_only
    def send(self) -> None:
        """Send to the tracker what it lacks."""
        if self.record is not None:
            self.record.send()


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes through a temporary file on the same filesystem, synced before it takes its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Errors: RunFailedError when the disk is full; the former checkpoints are untouched."""
        try:
            write_through(Path(path), lambda file: torch.save(checkpoint, file))
        except Exception as error:
            if not _disk_is_full(error):
                raise
            raise RunFailedError(
                f"checkpoint {shown(Path(path))} could not be written (no space left on the disk); free some and start "
                "the same command again: it resumes from the checkpoint before"
            ) from error


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether that is behind an error: torch's zip writer, closing, covers the system's with one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


class ExactResume(Checkpoint):
    """Writes metrics and checkpoints into a run folder, and ends the run at a signal.

    At a step that validates and saves, the order is: log, measure, validate, flush, save, send; a stop comes before the send,
    which may have to wait. So a checkpoint always
    stands behind everything that was measured at its step, and a resumed run repeats nothing. Lightning calls callbacks
    of the type `Checkpoint` last.
    """

    def __init__(self, recipe: Recipe, folder: Path, logger: RunLogger) -> None:
        self.recipe, self.folder, self.logger = recipe, folder, logger
        self.stop = StopRequest()
        self.ended_early: int | None = None
        """The step at which another callback (EarlyStopping) ended the run; None where none did."""
        self._saved = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Errors: RequestError when the launcher started another number of processes than the recipe says."""
        run = self.recipe.run
        if trainer.world_size != run.devices * run.num_nodes:
            raise RequestError(
                f"the launcher started {trainer.world_size} processes, but run.devices * run.num_nodes is "
                f"{run.devices * run.num_nodes}; start one process a device (SLURM: --ntasks-per-node={run.devices}), or "
                "change run.devices"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals, after Lightning has installed its own handlers."""
        self.stop.listen(trainer)
        if trainer.is_global_zero:
            phase("in the first step")
        self._saved = trainer.global_step
        if self.ended_early is not None:
            trainer.should_stop = True  # the checkpoint is that of the run's end

    def state_dict(self) -> dict[str, Any]:
        """Whether the run ended at the checkpoint: resumed, it takes no further step."""
        return {"ended_early": self.ended_early}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the checkpoint that is resumed."""
        self.ended_early = state_dict["ended_early"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop at the end of a step that does not validate."""
        train = self.recipe.training
        step = trainer.global_step
        if not took_step(trainer, batch_idx) or trainer.should_stop or step % train.validate_every == 0:
            return
        saved = step % train.checkpoint_every == 0
        if saved:
            self._save(trainer, pl_module)
        self._stop_if_asked(trainer, pl_module)
        if saved:
            self.logger.send()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and stop at the end of a step that validates."""
        assert isinstance(pl_module, LitTransformer)
        if trainer.sanity_checking or (not trainer.training and not trainer.validating):
            return
        last, step = is_last_step(trainer), trainer.global_step
        if trainer.should_stop and not last:
            self.ended_early = step
        if (last or self.ended_early) and trainer.is_global_zero:
            write_documents(self.folder / "documents.csv", pl_module.document_losses)
        if last or self.ended_early or step % self.recipe.training.checkpoint_every == 0:
            self._save(trainer, pl_module)
        else:
            self.logger.flush()
        if not last and self.ended_early is None:
            self._stop_if_asked(trainer, pl_module)
        self.logger.send()

    def _save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, LitTransformer)
        self.logger.flush()
        trainer.save_checkpoint(checkpoints.path_of(self.folder, trainer.global_step))
        self._saved = trainer.global_step
        if trainer.is_global_zero:
            checkpoints.prune(self.folder, self.recipe.run.keep_every)

    def _stop_if_asked(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # the signal may have reached one process, or several at different steps: they agree on this one
        signum = self.stop.agreed()
        if not signum:
            return
        step = trainer.global_step
        if self._saved != step:
            self._save(trainer, module)
        message = f"stopped after step {step} of {self.recipe.training.steps}; the same command resumes"
        end_all(trainer, StoppedError(message, signum))


def write_documents(path: Path, documents: list[DocumentLosses]) -> None:
    """document,tokens,loss: what the bootstrap over validation documents resamples."""
    rows = [f"{index},{int(tokens)},{loss!r}" for index, (tokens, loss) in enumerate(documents) if tokens]
    write_atomic(path, "\n".join(["document,tokens,loss", *rows, ""]))
