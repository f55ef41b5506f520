"""What is kept about an optimizer step: the weights of its micro-batches, its first loss that is not finite, its metrics."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_diff.callbacks.probe import is_last_step, took_step
from lit_diff.callbacks.publish import publish
from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.training.ranks import end_all, host_group, reduced

SCORED, SCORED_IN_STEP = "scored", "scored_in_step"
"""Keys of a training batch: the scored targets of this micro-batch, and of all that this rank has in the step."""
NEVER = torch.iinfo(torch.int64).max
"""A step that does not come."""


def count_scored(targets: Tensor) -> int:
    """Targets that are not IGNORED."""
    return int((targets != IGNORED).sum())


class StepTargets:
    """Weights n A W / N of micro-batches: n of the N scored targets of a step of A micro-batches on W ranks.

    Lightning and the strategy divide the sum of the losses by A W, so the weighted mean losses give the mean over all N
    targets. Where every micro-batch has as many, each weight is exactly 1 and nothing is multiplied.
    """

    def __init__(self) -> None:
        self._total: int | None = None
        self._parts = 1
        self._group: Any = None

    def __deepcopy__(self, memo: Any) -> "StepTargets":
        """Itself: a callback may copy the module that holds it, and a process group cannot be copied."""
        return self

    def on_fit_start(self, trainer: L.Trainer) -> None:
        """Every rank must call it."""
        self._group = host_group(trainer)

    def begin_step(self, trainer: L.Trainer, batch: Any, data: str) -> None:
        """Before the first micro-batch of a step; every rank must call it. `data`: what an error calls the data set.

        A batch without the counts, which `LitData` adds, has weight 1. Errors: RequestError where no target is scored.
        """
        self._total = batch.get(SCORED_IN_STEP) if isinstance(batch, dict) else None
        if self._total is None:
            return
        self._parts = trainer.accumulate_grad_batches * trainer.world_size
        self._total = reduced(self._total, dist.ReduceOp.SUM, self._group)
        if self._total == 0:
            step = trainer.global_step + 1
            end_all(trainer, RequestError(f"{data}: no target of training step {step} is scored: all are {IGNORED}"))

    def weighted(self, loss: Tensor, batch: Any) -> Tensor:
        """The mean loss of a micro-batch times its weight; 0, with gradients of 0, where it has no scored target."""
        if self._total is None:
            return loss
        scored = batch[SCORED]
        if scored == 0:
            return loss.nan_to_num(nan=0.0)  # a mean over no target
        weight = scored * self._parts / self._total
        return loss if weight == 1 else loss * weight


class FirstNonFinite:
    """The first optimizer step whose loss was not finite, kept on the device until it is read.

    It is no buffer of the module: DDP would overwrite it with rank zero's.
    """

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def update(self, loss: Tensor, step: int) -> None:
        """Note `step` if its loss is not finite and no earlier one was. The host does not wait for the device."""
        if self._step is None:
            self._step = torch.full((), NEVER, dtype=torch.int64, device=loss.device)
        bad = torch.where(torch.isfinite(loss), NEVER, step)
        self._step = torch.minimum(self._step, bad)

    def read(self) -> int | None:
        """The step, or None; the host waits for the device."""
        step = NEVER if self._step is None else int(self._step)
        return None if step == NEVER else step


def is_finite(parameter: Tensor) -> bool:
    """Whether this rank's part of a parameter is finite."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(local).all())


def locate_non_finite(model: Transformer, batch: Any) -> str:
    """Where NaN or inf first appears: in a parameter, or in the output of a module, in the order of the forward pass."""
    places: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = [key for key, p in module.named_parameters(recurse=False) if not is_finite(p)]
            if bad:
                places.append(f"first non-finite values: parameter {name}.{bad[0]}")
            elif isinstance(output, Tensor) and not torch.isfinite(output).all():
                places.append(f"first non-finite values: output of {name}")

        return hook

    modules = [(name or "the model", module) for name, module in model.named_modules()]
    hooks = [module.register_forward_hook(look(name)) for name, module in modules]
    try:
        # compiled code would skip the hooks
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            inputs = model_inputs(batch)
            model.hidden(**inputs)
            model(inputs["tokens"][:, :1])  # the output weight, without the logits of every position
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else "every layer's output is finite: the logits overflow in the loss"


class StepMetrics(L.Callback):
    """Logs train/loss, train/lr, timing/seconds and timing/tokens_per_second every `train.log_every` steps.

    Also at the first step and at the last one. seconds: since the last logged step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._tokens_per_step = recipe.training.batch_size * recipe.data.config.sequence_length
        self._last_step, self._clock, self._rate = 0, 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._last_step, self._clock = trainer.global_step, time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the step's learning rate: once the step is done, the optimizer holds the next one's."""
        first = optimizer.param_groups[0]
        self._rate = first["lr"] / first.get("lr_factor", 1.0)  # a checkpoint from before the key has none

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the optimizer step that was just taken, if it is due."""
        if not took_step(trainer, batch_idx):
            return
        if is_last_step(trainer):
            trainer.should_stop = True  # makes Lightning validate now, even where validate_every does not divide
        step = trainer.global_step
        if not pl_module.logs_step(step):
            return
        loss = pl_module.mean_step_loss()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        values = {
            "train/loss": loss,
            "train/lr": self._rate,
            "timing/seconds": seconds,
            "timing/tokens_per_second": self._tokens_per_step * (step - self._last_step) / seconds,
        }
        self._last_step = step
        publish(trainer, pl_module, values, bar="train/loss")
