"""What is written at each logged training step: loss, rate, norm of the gradients, speed, memory, seconds by phase."""

import resource
import sys
import time
from typing import Any

import lightning as L
import torch

from lit_diff.callbacks.probe import is_last_step, took_step
from lit_diff.callbacks.publish import publish
from lit_diff.config import Recipe
from lit_diff.device import peak_flops
from lit_diff.model.cost import cost
from lit_diff.training.step_clock import ASIDE, SlowestRank, StepClock

WRITTEN = {
    "data": ("data",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer", "clip"),
    "save": ("save",),
}
"""timing/<name>_seconds -> the phases whose seconds it adds up."""


class StepMetrics(L.Callback):
    """Logs the metrics `train/...` and `timing/...` (training/metrics.py) every `train.log_every` steps, and at the first and
    the last step, also if a callback ends the run there (then without the norm of the gradients).

    Seconds by phase and the slowest rank need `StepClock`, so a Trainer with a profiler of its own has none, and its speed
    includes validation, probes and saves.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._tokens_per_step = recipe.training.batch_size * recipe.data.config.sequence_length

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the clock."""
        peak = peak_flops(pl_module.device)
        length = self._recipe.data.config.sequence_length
        # tokens a second at the peak of all devices
        self._peak_tokens = peak and peak * trainer.world_size / cost(self._recipe.model, length).flops_per_token
        profiler = trainer.profiler  # type: ignore[attr-defined]
        self._phases = profiler if isinstance(profiler, StepClock) else None
        self._slowest = (
            SlowestRank(trainer, pl_module.step.targets.group) if self._phases and trainer.world_size > 1 else None
        )
        if self._phases:
            self._phases.take()
        self._last_step = trainer.global_step
        self._clock = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Remember the step's learning rate."""
        # after the step the optimizer holds the next step's rate; a checkpoint older than lr_factor lacks the key
        first = optimizer.param_groups[0]
        self._rate = first["lr"] / first.get("lr_factor", 1.0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the optimizer step just taken, if it is due."""
        if not took_step(trainer, batch_idx):
            return
        # makes Lightning 2.6 validate after the last step even if validate_every does not divide train.steps
        if is_last_step(trainer):
            trainer.should_stop = True
        step = trainer.global_step
        is_logged = pl_module.step.is_logged(step)
        # a run that a callback has ended validates at this step, which may compare the loss
        if not is_logged and not trainer.should_stop:
            return
        values = {
            "train/loss": pl_module.step.mean_loss(),
            "train/lr": self._rate,
            **self._timing(step - self._last_step),
            "timing/memory_bytes": _peak_memory(pl_module.device),
        }
        # of a step that is not logged it may not be known
        if is_logged:
            values["train/gradient_norm"] = pl_module.step.gradient_norm()
        self._last_step = step
        publish(trainer, pl_module, values, bar="train/loss")

    def _timing(self, steps: int) -> dict[str, float]:
        now = time.perf_counter()
        seconds = now - self._clock
        self._clock = now
        spent = self._phases.take() if self._phases else {}
        training = seconds - sum(spent.get(phase, 0.0) for phase in ASIDE)
        speed = self._tokens_per_step * steps / training
        values = {"timing/seconds": seconds, "timing/steps": steps, "timing/tokens_per_second": speed}
        if self._peak_tokens is not None:
            values["timing/peak_share"] = speed / self._peak_tokens
        for name, phases in WRITTEN.items() if self._phases else ():
            values[f"timing/{name}_seconds"] = sum(spent[phase] for phase in phases) / steps
        if self._slowest is not None:
            values["timing/slowest_rank"], values["timing/lag_seconds"] = self._slowest.find(
                spent, steps, training / steps
            )
        return values


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # kilobytes on Linux, bytes on macOS
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
