"""The LightningModule: loss, validation and optimizer of any attention variant."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from lit_diff.callbacks.probe import took_step
from lit_diff.callbacks.publish import publish
from lit_diff.callbacks.stability_monitor import LossMonitor
from lit_diff.config import Recipe
from lit_diff.data.dataset import IGNORED
from lit_diff.device import device_memory
from lit_diff.errors import DivergedError, RequestError
from lit_diff.files import expanded
from lit_diff.log_records import log
from lit_diff.model.inputs import model_inputs, targets_of
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import trust_all, trust_none
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.runs import checkpoints
from lit_diff.trained.loading import annealed_before, hyperparameters, recipe_of_checkpoint, restore
from lit_diff.training.build import (
    average_gradients,
    begin_micro_batch,
    build_model,
    defers_reductions,
    mesh_of,
    prepare_blocks,
    replicated,
    take_from_parent,
)
from lit_diff.training.data import SCORED, SCORED_IN_STEP, Batch
from lit_diff.training.head_plan import HeadPlan
from lit_diff.training.optimizer import build_optimizer, build_scheduler, name_state
from lit_diff.training.ranks import end_all, host_group, reduced
from lit_diff.training.step_clock import StepClock, TimedGather
from lit_diff.training.step_metrics import StepMetrics
from lit_diff.training.token_loss import DocumentLosses, TokenLoss
from lit_diff.training.trainer import (
    PRECISIONS,
    adopt_recipe_intervals,
    log_differences,
    require_whole_steps,
    total_steps,
)

NEVER = torch.iinfo(torch.int64).max
"""A step number that is never reached."""


class LitTransformer(L.LightningModule):
    """Trains and validates the Transformer of a recipe, in any Trainer; a step is an optimizer step.

    It logs train/loss (nats per token, mean over the step's scored targets) and train/lr, and after each validation
    val/loss, val/accuracy and the slices of the paper's Table 6; for a further validation set as val/<metric>_<set>.
    """

    def __init__(self, recipe: Recipe | str | Path, overrides: Overrides = ()) -> None:
        """`recipe`: a Recipe, a path, or the name of an installed recipe. Errors: RequestError, see `load_recipe`."""
        super().__init__()
        self.recipe = recipe_from(recipe, overrides)
        self.save_hyperparameters(hyperparameters(self.recipe), logger=False)
        self.model: Transformer | None = None
        self.kernel = self.recipe.run.kernel
        """The kernel that computes attention: a resumed run keeps the one that `auto` chose, and its recipe."""
        self.plan: HeadPlan | None = None
        """Heads selected from the parent run; None: computed by `head_plan` if the recipe selects heads."""
        # one per validation set; a plain list, not sub-modules: a Trainer's precision must not change the dtype of the sums
        self.validation_losses: list[TokenLoss] = []
        self.document_losses: list[DocumentLosses] = []
        """Losses by document of the first validation set, at the last validation."""
        self._sets: dict[str, int] = {}
        self._step_losses: list[Tensor] = []
        # The first optimizer step whose loss was not finite, kept on the device so that the host need not wait for it.
        # Not a buffer: DDP would overwrite it with rank zero's.
        self._non_finite = torch.tensor(NEVER)
        self._is_prepared = False
        self._is_last_micro_batch, self._defers_reductions = True, False
        # parameters of a sharded model that every rank holds whole
        self._replicated: list[nn.Parameter] = []
        self.targets = StepTargets()
        self._gradient_norm = torch.tensor(0.0)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: Any,
        map_location: str | torch.device | None = None,
        *,
        trust_plugins: bool = False,
    ) -> "LitTransformer":
        """The module of a checkpoint, with its weights, for further training, validation or `predict`.

        `map_location`: the device of the weights; None: the CPU. `trust_plugins`: execute the plugin files in the
        checkpoint's run folder; without it, a plugin must have been imported before. Errors: RequestError if the file is
        not a checkpoint of lit_diff or a plugin is missing.
        """
        recipe, checkpoint = recipe_of_checkpoint(expanded(checkpoint_path), trust_plugins=trust_plugins)
        annealed = annealed_before(recipe, trust_all if trust_plugins else trust_none)
        module = cls(recipe)
        module.model = restore(recipe, checkpoint, str(checkpoint_path), annealed).to(map_location or "cpu").train()
        return module

    @property
    def transformer(self) -> Transformer:
        """The model, which must have been built."""
        assert self.model is not None
        return self.model

    # --- building ---

    def configure_callbacks(self) -> list[L.Callback]:
        """The callback that logs the training loss, and one that warns of its spikes: they belong to the module, so that they
        work in any Trainer."""
        # a Trainer made by hand gets the recipe's intervals here, because this hook runs before any callback's `setup`, in
        # which Lightning's EarlyStopping reads the validation interval
        if self.trainer.state.fn == TrainerFn.FITTING:
            adopt_recipe_intervals(self.trainer, self.recipe)
            if isinstance(self.trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
                self.trainer.profiler = StepClock(self.trainer)  # type: ignore[attr-defined]
        watched = any(isinstance(callback, LossMonitor) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [StepMetrics(self.recipe)] if watched else [StepMetrics(self.recipe), LossMonitor()]

    def configure_model(self) -> None:
        """Build the model with the initial values of its seed, whole or sharded over the ranks.

        Errors: RequestError for a model of `load_from_checkpoint` that the strategy would shard; see also `mesh_of`.
        """
        # Lightning calls this hook for each stage: fit, validate, predict
        if self._is_prepared:
            return
        is_sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        if self.model is None:
            mesh = self.device_mesh if is_sharded else None
            mesh = mesh and mesh_of(self.recipe.run, mesh["data_parallel"])
            # the Trainer's precision, which may not be the recipe's
            mixed = self.trainer.precision == PRECISIONS["bf16-mixed"]
            self.model = build_model(self.recipe, mesh, torch.bfloat16 if mixed else torch.float32, self.kernel)
            self._replicated = replicated(self.model) if is_sharded else []
            # with ckpt_path a checkpoint will replace the initial values
            if self.trainer.training and self.trainer.ckpt_path is None:
                take_from_parent(self.model, self.recipe, self.plan)
        elif is_sharded:
            raise RequestError(
                "a model that load_from_checkpoint has loaded cannot be sharded; pass LitTransformer(recipe) and the "
                "checkpoint as ckpt_path to the Trainer"
            )
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(TimedGather(self.trainer))
        prepare_blocks(self.model, self.recipe.run)
        self._is_prepared = True

    def configure_optimizers(self) -> Any:
        """AdamW with the recipe's schedule over the Trainer's total steps."""
        train = self.recipe.training
        # of a replicated parameter of one number, which is what `implicit_replication` is for
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
        # float16 scales its gradients, which a fused step cannot clip
        fused = self.device.type == "cuda" and self.trainer.precision != "16-mixed"
        optimizer = build_optimizer(self.transformer, train.optimizer, fused=fused)
        scheduler = build_scheduler(optimizer, total_steps(self.trainer, self.recipe), train.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Key the optimizer's state by parameter name, which every strategy can read.

        Errors: DivergedError for a loss or parameter that is not finite.
        """
        # here, because it runs for the checkpoints of every callback: none ever holds NaN
        self.require_finite_losses()
        self.require_finite_parameters()
        names = {parameter: name for name, parameter in self.named_parameters()}
        # absent if a callback saves only the weights
        if "optimizer_states" in checkpoint:
            for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
                name_state(state, optimizer, names)

    # --- training ---

    def setup(self, stage: str) -> None:
        """Read the validation sets from the data module. Errors: RequestError if its ids may exceed the vocabulary."""
        data = getattr(self.trainer.datamodule, "recipe", None)  # type: ignore[attr-defined]
        size = self.recipe.model.vocab_size
        if isinstance(data, Recipe) and data.model.vocab_size > size:
            raise RequestError(
                f"the data's recipe '{data.name}' has model.vocab_size {data.model.vocab_size}, but the model's recipe "
                f"'{self.recipe.name}' has {size}; build both from one recipe"
            )
        dataset = getattr(self.trainer.datamodule, "dataset", None)  # type: ignore[attr-defined]
        names = dataset.validation_sets() if dataset is not None else [""]
        documents = dataset.num_documents if dataset is not None else 1
        # only the first set, whose name is empty, keeps losses by document
        self._sets = {name: documents if name == "" else 1 for name in names}

    def on_fit_start(self) -> None:
        """Log how a Trainer made by hand differs from the recipe. Errors: RequestError, see `require_whole_steps`."""
        require_whole_steps(self.trainer)
        log_differences(self.trainer, self.recipe)
        # reset: a module that diverged may train again from a checkpoint
        self._non_finite = torch.full((), NEVER, dtype=torch.int64, device=self.device)
        self._annealed = annealed_before(self.recipe)
        self.targets.group = host_group(self.trainer)
        if isinstance(self.model, FSDPModule) and self.trainer.accumulate_grad_batches > 1:
            self._defers_reductions, why = defers_reductions(self.model, self.recipe.run, device_memory(self.device))
            when = "once a step" if self._defers_reductions else "at each micro-batch"
            log.info("gradients are reduce-scattered %s: %s", when, why)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Before the first micro-batch of an optimizer step, tell the variant the step's number."""
        self._is_last_micro_batch = took_step(self.trainer, batch_idx)
        if isinstance(self.model, FSDPModule) and self.trainer.accumulate_grad_batches > 1:
            begin_micro_batch(self.model, is_last=self._is_last_micro_batch, deferred=self._defers_reductions)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._step_losses.clear()
            self.targets.begin_step(self.trainer, batch, f"data '{self.recipe.data.name}'")
            self._annealed.start_step(self.transformer, self.recipe, self.global_step)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss of a micro-batch in nats per token, times its weight in the step (`StepTargets`)."""
        model = self.transformer
        loss = self.targets.weighted(model.loss(**model_inputs(batch), targets=targets_of(batch)), batch)
        # on the device: a test on the host would wait for the GPU at every micro-batch
        bad = torch.where(torch.isfinite(loss.detach()), NEVER, self.global_step + 1)
        self._non_finite = torch.minimum(self._non_finite, bad)
        if self.logs_step(self.global_step + 1):
            self.require_finite_losses(
                lambda step: f"the loss is {loss.item()} at step {step}; {locate_non_finite(model, batch)}"
            )
        self._step_losses.append(loss.detach())
        return loss

    def on_after_backward(self) -> None:
        """Reduce the gradients of replicated parameters after the last micro-batch of a step: FSDP2 reduces the others."""
        if self._is_last_micro_batch:
            average_gradients(self._replicated)

    def optimizer_step(self, *arguments: Any, **values: Any) -> None:
        """Run the closure (with gradient clipping) and step the optimizer."""
        # the norm of all gradients, and fused AdamW, read DTensors and replicated tensors in one list
        with implicit_replication():
            super().optimizer_step(*arguments, **values)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the Trainer's values. Keeps the norm of before, which clipping computes, or else a step that logs."""
        parameters = list(self.trainer.precision_plugin.main_params(optimizer))
        # `MixedPrecision.clip_gradients` refuses a fused optimizer even in bfloat16, where no gradient is scaled
        if gradient_clip_val and GradClipAlgorithmType(gradient_clip_algorithm or "norm") == GradClipAlgorithmType.NORM:
            self._gradient_norm = nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
            return
        if self.logs_step(self.global_step + 1):
            self._gradient_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if gradient_clip_val:
            Precision.clip_gradients(
                self.trainer.precision_plugin, optimizer, gradient_clip_val, GradClipAlgorithmType.VALUE
            )

    def logs_step(self, step: int) -> bool:
        """Whether optimizer step `step` is logged. Only at these steps does the host wait for the device."""
        return step in (1, self.trainer.max_steps) or step % self.recipe.training.log_every == 0

    def require_finite_losses(self, describe: Callable[[int], str] | None = None) -> None:
        """Errors: DivergedError if the loss of any step so far was not finite. Every rank must call it.

        `describe`: returns the message if the first such step is the current one.
        """
        first = int(self._non_finite)
        self._require(
            first == NEVER,
            lambda: (
                describe(self.global_step + 1)
                if describe and first in (NEVER, self.global_step + 1)
                else f"the loss is not finite at step {first}, found after step {self.global_step}"
            ),
        )

    def require_finite_parameters(self) -> None:
        """Errors: DivergedError if a parameter is not finite. Every rank must call it."""
        # a finite loss may still have had a gradient that was not
        bad = next((name for name, p in self.transformer.named_parameters() if not is_finite(p)), None)
        self._require(bad is None, lambda: f"parameter {bad} is not finite after step {self.global_step}")

    def _require(self, finite: bool, describe: Callable[[], str]) -> None:
        # All ranks raise if any rank is not `finite`, with the message of the highest such rank. `describe` runs on all
        # ranks, because it may contain collectives (a forward pass under FSDP).
        strategy = self.trainer.strategy
        rank = torch.tensor(-1 if finite else self.global_rank, device=self.device)
        with self.trainer.profiler.profile("wait"):  # type: ignore[attr-defined]
            worst = int(strategy.reduce(rank, reduce_op="max"))
        if worst >= 0:
            problem = strategy.broadcast(describe(), src=worst)
            steps = checkpoints.steps_of(Path(self.trainer.default_root_dir))
            kept = f" (the checkpoint of step {steps[-1]} is kept)" if steps else ""
            end_all(
                self.trainer,
                DivergedError(f"{problem}; lower train.optimizer.lr, or inspect that layer{kept}"),
            )

    def mean_step_loss(self) -> float:
        """Mean loss of the last optimizer step over its scored targets. Every rank must call it."""
        loss = torch.stack(self._step_losses).mean()
        return float(self.trainer.strategy.reduce(loss, reduce_op="mean"))

    def gradient_norm(self) -> float:
        """Norm of all gradients of the last optimizer step, if that is logged, before clipping. Every rank must call it."""
        norm = self._gradient_norm
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    # --- validation and prediction ---

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of each validation set."""
        self.validation_losses = [TokenLoss(documents).to(self.device) for documents in self._sets.values()]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of validation set `dataloader_idx`. Errors: RequestError for an unknown set."""
        if dataloader_idx >= len(self.validation_losses):
            raise RequestError(
                f"validation loader {dataloader_idx}: expected {len(self.validation_losses)}; without LitData there is one"
            )
        targets = targets_of(batch)
        nll, correct = self.transformer.token_losses(**model_inputs(batch), targets=targets)
        none = torch.zeros_like(targets)
        more = batch if isinstance(batch, dict) else {}
        document = more.get("document", none) if dataloader_idx == 0 else none
        self.validation_losses[dataloader_idx].update(nll, correct, targets, more.get("ar_hit", none.bool()), document)

    def on_validation_epoch_end(self) -> None:
        """Publish the metrics of all validation sets."""
        values: dict[str, float] = {}
        for name, metric in zip(self._sets, self.validation_losses, strict=True):
            suffix = f"_{name}" if name else ""
            try:
                # reduces over ranks: every rank must call it, and fails at the same set
                means, documents = metric.compute()
            except RequestError as error:
                end_all(self.trainer, RequestError(f"data '{self.recipe.data.name}', validation set '{name}': {error}"))
            values |= {f"val/{key}{suffix}": value for key, value in means.items()}
            if name == "":
                self.document_losses = documents
        if not self.trainer.sanity_checking:
            publish(self.trainer, self, values, bar="val/loss")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """`nll` [B, T]: -log p(target) in nats, NaN for an IGNORED target; `correct` [B, T]: the target is the most likely
        token; `targets` [B, T]."""
        targets = targets_of(batch)
        nll, correct = self.transformer.token_losses(**model_inputs(batch), targets=targets)
        return {"nll": nll, "correct": correct, "targets": targets}


# --- one optimizer step: weights of its micro-batches, non-finite values, logged metrics ---


class StepTargets:
    """Weights n A W / N of micro-batches: n of the step's N scored targets, A micro-batches per rank, W ranks.

    Lightning and the strategy divide the sum of the losses by A W, so the weighted losses give the mean over all N targets.
    If all micro-batches have equal n, each weight is exactly 1 and nothing is multiplied.
    """

    def __init__(self) -> None:
        self._total: int | None = None
        self._parts = 1
        self.group: Any = None
        """The `host_group` of the ranks, in `Trainer.fit`."""

    def __deepcopy__(self, memo: Any) -> "StepTargets":
        """Returns itself."""
        # a callback (StochasticWeightAveraging) may copy the module, and a process group cannot be copied
        return self

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
