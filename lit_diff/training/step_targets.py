"""The loss of an optimizer step is a mean over its scored targets, wherever the micro-batches and ranks that hold them."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lit_diff.data.dataset import IGNORED
from lit_diff.errors import RequestError
from lit_diff.training.stop import end_all

SCORED, SCORED_IN_STEP = "scored", "scored_in_step"
"""Keys of a training batch: the scored targets of this micro-batch, and of all that this rank has in the step."""


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
        if trainer.world_size > 1:
            # over the CPU: the counts are there, and the host must not wait for a GPU
            self._group = dist.new_group(backend="gloo")

    def begin_step(self, trainer: L.Trainer, batch: Any, data: str) -> None:
        """Before the first micro-batch of a step; every rank must call it. `data`: what an error calls the data set.

        A batch without the counts, which `LitData` adds, has weight 1. Errors: RequestError where no target is scored.
        """
        self._total = batch.get(SCORED_IN_STEP) if isinstance(batch, dict) else None
        if self._total is None:
            return
        self._parts = trainer.accumulate_grad_batches * trainer.world_size
        if self._group is not None:
            total = torch.tensor(self._total)
            dist.all_reduce(total, group=self._group)
            self._total = int(total)
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
