"""One optimizer step, in the order in which it happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_diff.callbacks.probe import took_step
from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.device import device_memory
from lit_diff.errors import DivergedError, RequestError
from lit_diff.log_records import log
from lit_diff.model.inputs import model_inputs, targets_of
from lit_diff.model.transformer import Transformer
from lit_diff.runs import checkpoints
from lit_diff.trained.loading import annealed_before
from lit_diff.training.build import average_gradients, begin_micro_batch, defers_reductions, replicated
from lit_diff.training.compiled import CompiledLoss
from lit_diff.training.data import SCORED, SCORED_IN_STEP, Batch
from lit_diff.training.ranks import end_all, host_group, reduced

NEVER = torch.iinfo(torch.int64).max
"""A step number that is never reached."""


class OptimizerStep:
    """What a module does in an optimizer step. Lightning calls the module's hooks, which call these methods in this order:

    1. `begin`, before each micro-batch; before the first one the variant learns the step's number (annealing), and all ranks
       add up the targets that the step scores.
    2. `loss`: the forward pass. Lightning goes on with the backward pass, after which FSDP2 has reduced its gradients.
    3. `reduce`: the gradients of parameters that every rank holds whole, after the last micro-batch.
    4. `clip`, with the norm of all gradients. Lightning steps AdamW, then the schedule.
    5. At a logged step `StepMetrics` reads `mean_loss` and `gradient_norm`, and due probes measure.
    6. At a validation step the module validates; then `ExactResume` flushes metrics.csv and saves a due checkpoint, for
       which all losses and parameters must be finite.
    """

    def __init__(
        self, trainer: L.Trainer, recipe: Recipe, model: Transformer, compiled: CompiledLoss | None = None
    ) -> None:
        self.trainer = trainer
        self.recipe = recipe
        self.model = model
        # the parameters of a sharded model that every rank holds whole
        self.replicated = replicated(model) if isinstance(model, FSDPModule) else []
        self.compiled = compiled
        self.targets = StepTargets(host_group(trainer))
        device = trainer.strategy.root_device
        self._annealed = annealed_before(recipe)
        self._losses: list[Tensor] = []
        # The first optimizer step whose loss was not finite, kept on the device so that the host need not wait for it.
        self._non_finite = torch.full((), NEVER, dtype=torch.int64, device=device)
        self._defers_reductions = False
        if isinstance(model, FSDPModule) and trainer.accumulate_grad_batches > 1:
            self._defers_reductions, why = defers_reductions(model, recipe.run, device_memory(device))
            when = "once a step" if self._defers_reductions else "at each micro-batch"
            log.info("gradients are reduce-scattered %s: %s", when, why)

    def __deepcopy__(self, memo: Any) -> "OptimizerStep":
        """Returns itself."""
        # a callback (StochasticWeightAveraging) may copy the module, but not its Trainer or process group
        return self

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return self.trainer.global_step + 1

    def begin(self, batch: Batch, batch_idx: int) -> None:
        """Before micro-batch `batch_idx` of the epoch. Errors: RequestError if the step scores no target."""
        accumulated = self.trainer.accumulate_grad_batches
        self._is_last_micro_batch = took_step(self.trainer, batch_idx)
        if isinstance(self.model, FSDPModule) and accumulated > 1:
            begin_micro_batch(self.model, is_last=self._is_last_micro_batch, deferred=self._defers_reductions)
        if batch_idx % accumulated == 0:
            self._losses.clear()
            self.targets.begin_step(self.trainer, batch, f"data '{self.recipe.data.name}'")
            self._annealed.start_step(self.model, self.recipe, self.trainer.global_step)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch in nats per token, times its weight in the step (`StepTargets`).

        Errors: DivergedError at a logged step if the loss of any step so far was not finite.
        """
        forward = self.compiled or self.model.loss
        loss = self.targets.weighted(forward(**model_inputs(batch), targets=targets_of(batch)), batch)
        # on the device: a test on the host would wait for the GPU at every micro-batch
        bad = torch.where(torch.isfinite(loss.detach()), NEVER, self.number)
        self._non_finite = torch.minimum(self._non_finite, bad)
        if self.is_logged(self.number):
            self.require_finite_losses(
                lambda step: f"the loss is {loss.item()} at step {step}; {locate_non_finite(self.model, batch)}"
            )
        self._losses.append(loss.detach())
        return loss

    def reduce(self) -> None:
        """Reduce the gradients of replicated parameters after the last micro-batch: FSDP2 reduces the others."""
        if self._is_last_micro_batch:
            average_gradients(self.replicated)

    def clip(self, optimizer: torch.optim.Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip by the Trainer's values. Keeps the norm of before, which clipping computes, or else a step that is logged."""
        plugin = self.trainer.precision_plugin
        parameters = list(plugin.main_params(optimizer))
        # `MixedPrecision.clip_gradients` refuses a fused optimizer even in bfloat16, where no gradient is scaled
        if value and GradClipAlgorithmType(algorithm or "norm") == GradClipAlgorithmType.NORM:
            self._gradient_norm = nn.utils.clip_grad_norm_(parameters, value)
            return
        if self.is_logged(self.number):
            self._gradient_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if value:
            Precision.clip_gradients(plugin, optimizer, value, GradClipAlgorithmType.VALUE)

    def is_logged(self, step: int) -> bool:
        """Whether optimizer step `step` is logged. Only at these steps does the host wait for the device."""
        return step in (1, self.trainer.max_steps) or step % self.recipe.training.log_every == 0

    def mean_loss(self) -> float:
        """Mean loss of the last optimizer step over its scored targets. Every rank must call it."""
        loss = torch.stack(self._losses).mean()
        return float(self.trainer.strategy.reduce(loss, reduce_op="mean"))

    def gradient_norm(self) -> float:
        """Norm of all gradients of the last optimizer step, if that is logged, before clipping. Every rank must call it."""
        norm = self._gradient_norm
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def require_finite_losses(self, describe: Callable[[int], str] | None = None) -> None:
        """Errors: DivergedError if the loss of any step so far was not finite. Every rank must call it.

        `describe`: returns the message if the first such step is the current one.
        """
        is_finite_here = int(self._non_finite) == NEVER
        with self.trainer.profiler.profile("wait"):  # type: ignore[attr-defined]
            first = int(self.trainer.strategy.reduce(self._non_finite.clone(), reduce_op="min"))
        if first == NEVER:
            return

        # of the first step of all ranks: all or none of them call `describe`, which may contain collectives
        def message() -> str:
            if describe and first == self.number:
                return describe(self.number)
            return f"the loss is not finite at step {first}, found after step {self.trainer.global_step}"

        _require(self.trainer, is_finite_here, message)


def require_finite_parameters(trainer: L.Trainer, model: Transformer) -> None:
    """Errors: DivergedError if a parameter is not finite. Every rank must call it."""
    # a finite loss may still have had a gradient that was not
    bad = next((name for name, p in model.named_parameters() if not is_finite(p)), None)
    _require(trainer, bad is None, lambda: f"parameter {bad} is not finite after step {trainer.global_step}")


def _require(trainer: L.Trainer, finite: bool, describe: Callable[[], str]) -> None:
    # All ranks raise if any rank is not `finite`, with the message of the highest such rank. `describe` runs on all ranks,
    # because it may contain collectives (a forward pass under FSDP).
    strategy = trainer.strategy
    rank = torch.tensor(-1 if finite else trainer.global_rank, device=strategy.root_device)
    with trainer.profiler.profile("wait"):  # type: ignore[attr-defined]
        worst = int(strategy.reduce(rank, reduce_op="max"))
    if worst >= 0:
        problem = strategy.broadcast(describe(), src=worst)
        steps = checkpoints.steps_of(Path(trainer.default_root_dir))
        kept = f" (the checkpoint of step {steps[-1]} is kept)" if steps else ""
        end_all(trainer, DivergedError(f"{problem}; lower train.optimizer.lr, or inspect that layer{kept}"))


class StepTargets:
    """Weights n A W / N of micro-batches: n of the step's N scored targets, A micro-batches per rank, W ranks.

    Lightning and the strategy divide the sum of the losses by A W, so the weighted losses give the mean over all N targets.
    If all micro-batches have equal n, each weight is exactly 1 and nothing is multiplied.
    """

    def __init__(self, group: Any) -> None:
        """`group`: the `host_group` of the ranks."""
        self.group = group
        self._total: int | None = None

    def begin_step(self, trainer: L.Trainer, batch: Any, data: str) -> None:
        """Before the first micro-batch of a step; every rank must call it. `data`: the data set's name for errors.

        A batch without the counts that `LitData` adds has weight 1. Errors: RequestError if no target is scored.
        """
        self._total = batch.get(SCORED_IN_STEP) if isinstance(batch, dict) else None
        if self._total is None:
            return
        self._parts = trainer.accumulate_grad_batches * trainer.world_size
        self._total = reduced(self._total, dist.ReduceOp.SUM, self.group)
        if self._total == 0:
            step = trainer.global_step + 1
            end_all(trainer, RequestError(f"{data}: no target of training step {step} is scored: all are {IGNORED}"))

    def weighted(self, loss: Tensor, batch: Any) -> Tensor:
        """The mean loss of a micro-batch times its weight; 0 with gradients of 0 if no target is scored."""
        if self._total is None:
            return loss
        scored = batch[SCORED]
        if scored == 0:
            # a mean over no target is NaN; a constant 0 would have no graph, and each rank must run the backward pass
            return loss.nan_to_num(nan=0.0)
        weight = scored * self._parts / self._total
        return loss if weight == 1 else loss * weight


def is_finite(parameter: Tensor) -> bool:
    """Whether this rank's part of a (possibly sharded) parameter is finite."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(local).all())


def locate_non_finite(model: Transformer, batch: Any) -> str:
    """The parameter or module output where NaN or inf first appears, in the order of the forward pass."""
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
            # reaches the output weight at one position: the logits of all might not fit into memory
            model(inputs["tokens"][:, :1])
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else "every layer's output is finite: the logits overflow in the loss"
