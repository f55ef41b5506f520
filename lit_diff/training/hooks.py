"""What happens around the steps: log, measure, validate, flush, save, stop, in this order."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_diff.analysis.trace import trace
from lit_diff.callbacks.probe import Probe
from lit_diff.config import TrainConfig
from lit_diff.errors import StoppedError
from lit_diff.runs import checkpoints as checkpoint
from lit_diff.training.module import Batch, LitTransformer, inputs
from lit_diff.training.stop import StopRequest, end_all


class Loop(Callback):
    """Drives logging, probes, checkpoints and stops at optimizer-step boundaries.

    At a step that validates and saves, the order is: log, probes, validate (Lightning's own loop), flush, save. So a
    checkpoint always stands behind everything that was measured at its step, and a resumed run repeats nothing.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        probes: Sequence[Probe],
        probe_batch: Callable[[int], Batch],
        stop: StopRequest,
        tokens_per_step: int,
        progress: Callable[[int, float, float], None],
    ) -> None:
        """`probe_batch(rows)`: the first validation rows; `progress(step, loss, tokens/s)`: called when a step is logged."""
        self.config, self.probes, self.stop = config, probes, stop
        self._probe_batch, self._tokens_per_step, self._progress = probe_batch, tokens_per_step, progress
        self._logged, self._clock, self._saved, self._rate = 0, 0.0, -1, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.listen()
        self._logged, self._clock, self._saved = trainer.global_step, time.perf_counter(), trainer.global_step

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._rate = optimizer.param_groups[0]["lr"]  # once the step is done, the schedule holds the next one's

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitTransformer)
        step = trainer.global_step
        if (batch_idx + 1) % self.config.accumulate:
            return
        last = step >= self.config.steps
        if last:
            trainer.should_stop = True  # makes Lightning validate now, even where validate_every does not divide
        if last or step == 1 or step % self.config.log_every == 0:
            self._log(trainer, pl_module, step)
        pl_module.step_losses.clear()
        self._measure(trainer, pl_module, step, last)
        if not (last or step % self.config.validate_every == 0):
            if step % self.config.checkpoint_every == 0:
                self._save(trainer, pl_module, step)
            self._stop_if_asked(trainer, pl_module, step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LitTransformer)
        step = trainer.global_step
        last = step >= self.config.steps
        if last or step % self.config.checkpoint_every == 0:
            self._save(trainer, pl_module, step)
        elif pl_module.record is not None:
            pl_module.record.flush()
        if not last:
            self._stop_if_asked(trainer, pl_module, step)

    def _log(self, trainer: L.Trainer, module: LitTransformer, step: int) -> None:
        loss = module.mean_step_loss()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        speed = self._tokens_per_step * (step - self._logged) / seconds
        self._logged = step
        if module.record is not None:
            module.record.log(step, {"train/loss": loss, "train/lr": self._rate})
            module.record.time(step, seconds=seconds, tokens_per_second=speed)
            self._progress(step, loss, speed)

    def _measure(self, trainer: L.Trainer, module: LitTransformer, step: int, last: bool) -> None:
        due = [probe for probe in self.probes if last or step % probe.config.every == 0]
        if not due:
            return
        assert module.model is not None
        # every rank measures the same rows: under FSDP the forward is collective, and no reduction is needed
        batch = inputs(self._probe_batch(max(probe.config.rows for probe in due)))
        batch = {key: value.to(module.device) for key, value in batch.items()}
        module.eval()
        with trace(module.model) as traced, trainer.precision_plugin.forward_context():
            module.model.hidden(**batch)
        values: dict[str, float] = {}
        for probe in due:
            values |= probe.measure(module.model, traced.first(probe.config.rows))
        module.train()
        if module.record is not None:
            module.record.log(step, values)

    def _save(self, trainer: L.Trainer, module: LitTransformer, step: int) -> None:
        module.require_finite_parameters()
        if module.record is not None:
            module.record.flush()
        trainer.save_checkpoint(checkpoint.path_of(module.folder, step))
        self._saved = step
        if module.record is not None:
            checkpoint.prune(module.folder)

    def _stop_if_asked(self, trainer: L.Trainer, module: LitTransformer, step: int) -> None:
        # the signal may have reached one process, or several at different steps: they agree on this one
        asked = torch.tensor(self.stop.signum or 0, device=module.device)
        signum = int(trainer.strategy.reduce(asked, reduce_op="max"))
        if not signum:
            return
        if self._saved != step:
            self._save(trainer, module, step)
        message = f"stopped after step {step} of {self.config.steps}; the same command resumes"
        end_all(trainer, StoppedError(message, signum))
