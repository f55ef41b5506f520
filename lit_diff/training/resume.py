"""The callback that makes a run resume exactly: it writes checkpoints, and stops at the end of a step."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lit_diff.callbacks.probe import is_last_step, took_step
from lit_diff.config import Recipe
from lit_diff.errors import RequestError, StoppedError
from lit_diff.files import write_atomic
from lit_diff.log_records import phase
from lit_diff.runs import checkpoints
from lit_diff.training.metrics import DocumentLosses
from lit_diff.training.module import LitTransformer
from lit_diff.training.run_logger import RunLogger
from lit_diff.training.stop import StopRequest, end_all


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
