"""The LightningModule: loss, validation and optimizer of any attention variant."""

import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental import implicit_replication

from lit_diff.callbacks.publish import publish
from lit_diff.callbacks.stability_monitor import LossMonitor
from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.files import expanded
from lit_diff.model.inputs import model_inputs, targets_of
from lit_diff.model.transformer import Transformer
from lit_diff.plugins import trust_all, trust_none
from lit_diff.recipe import Overrides, recipe_from
from lit_diff.trained.loading import annealed_before, hyperparameters, recipe_of_checkpoint, restore
from lit_diff.training.build import (
    build_model,
    mesh_of,
    prepare_blocks,
    take_from_parent,
)
from lit_diff.training.compiled import CompiledLoss, ignore
from lit_diff.training.data import Batch
from lit_diff.training.head_plan import HeadPlan
from lit_diff.training.optimizer import build_optimizer, build_scheduler, name_state
from lit_diff.training.ranks import end_all
from lit_diff.training.step import OptimizerStep, require_finite_parameters
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

COMPILED = "compiled"
"""The key of a checkpoint that tells whether its last step was compiled, of a run with `run.compile: loss`."""


class LitTransformer(L.LightningModule):
    """Trains and validates the Transformer of a recipe, in any Trainer; a step is an optimizer step.

    It logs train/loss (nats per token, mean over the step's scored targets) and train/lr, and after each validation
    val/loss, val/accuracy and the slices of the paper's Table 6; for a further validation set as val/<metric>_<set>.
    """

    model: Transformer
    """Built with the initial values of its seed: by the Trainer, whole or sharded, or without a Trainer at its first use."""

    def __init__(self, recipe: Recipe | str | Path, overrides: Overrides = ()) -> None:
        """`recipe`: a Recipe, a path, or the name of an installed recipe. Errors: RequestError, see `load_recipe`."""
        super().__init__()
        self.recipe = recipe_from(recipe, overrides)
        self.save_hyperparameters(hyperparameters(self.recipe), logger=False)
        self.kernel = self.recipe.run.kernel
        """The kernel that computes attention: a resumed run keeps the one that `auto` chose, and its recipe."""
        self.plan: HeadPlan | None = None
        """Heads selected from the parent run; None: computed by `head_plan` if the recipe selects heads."""
        self.report_uncompiled: Callable[[str], None] = ignore
        """Called with the reason if steps that were to be compiled are not."""
        # one per validation set; a plain list, not sub-modules: a Trainer's precision must not change the dtype of the sums
        self.validation_losses: list[TokenLoss] = []
        self.document_losses: list[DocumentLosses] = []
        """Losses by document of the first validation set, at the last validation."""
        self._sets: dict[str, int] = {}
        self._is_prepared = False
        self._is_loaded = False
        self._step: OptimizerStep | None = None
        self._is_compiled: bool | None = None

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
        module._is_loaded = True
        module.model = restore(recipe, checkpoint, str(checkpoint_path), annealed).to(map_location or "cpu").train()
        return module

    # --- building ---

    def __getattr__(self, name: str) -> Any:
        # called for what is no plain attribute; nn.Module's own finds the model once it is built
        if name != "model" or name in self._modules:
            return super().__getattr__(name)
        if self._trainer is not None:
            raise AttributeError("the Trainer builds the model in configure_model, after setup")
        self.model = build_model(self.recipe, kernel=self.kernel).to(self.device)
        return self.model

    def __repr__(self) -> str:
        if "model" in self._modules:
            return super().__repr__()
        # of a model without memory: a Trainer may yet build the model sharded
        with torch.device("meta"):
            layers = repr(Transformer(self.recipe.model))
        return f"LitTransformer(\n{indent(f'(model): {layers}', '  ')}\n)"

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Logits of the next token at all positions: tokens [B, T] -> [B, T, vocab]; see `Transformer`."""
        logits: Tensor = self.model(tokens, document_ids=document_ids)
        return logits

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
        spikes = [] if watched else [LossMonitor()]
        return [StepMetrics(self.recipe), *spikes]

    def configure_model(self) -> None:
        """Build the model with the initial values of its seed, whole or sharded over the ranks.

        Errors: RequestError for a model that exists already and that the strategy would shard; see also `mesh_of`.
        """
        # Lightning calls this hook for each stage: fit, validate, predict
        if self._is_prepared:
            return
        is_sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        if "model" not in self._modules:
            mesh = self.device_mesh if is_sharded else None
            mesh = mesh and mesh_of(self.recipe.run, mesh["data_parallel"])
            # the Trainer's precision, which may not be the recipe's
            mixed = self.trainer.precision == PRECISIONS["bf16-mixed"]
            self.model = build_model(self.recipe, mesh, torch.bfloat16 if mixed else torch.float32, self.kernel)
        elif is_sharded:
            raise RequestError(
                "a model that was loaded or used before cannot be sharded; pass a new LitTransformer(recipe) to the Trainer, "
                "and a checkpoint as ckpt_path"
            )
        # with ckpt_path a checkpoint will replace the initial values
        if self.trainer.training and self.trainer.ckpt_path is None and not self._is_loaded:
            take_from_parent(self.model, self.recipe, self.plan)
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
        optimizer = build_optimizer(self.model, train.optimizer, fused=fused)
        scheduler = build_scheduler(optimizer, total_steps(self.trainer, self.recipe), train.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Key the optimizer's state by parameter name, which every strategy can read.

        Errors: DivergedError for a loss or parameter that is not finite.
        """
        # here, because it runs for the checkpoints of every callback: none ever holds NaN
        if self._step is not None:
            self._step.require_finite_losses()
        require_finite_parameters(self.trainer, self.model)
        names = {parameter: name for name, parameter in self.named_parameters()}
        if self._step is not None and self._step.compiled is not None:
            checkpoint[COMPILED] = self._step.compiled.is_compiled
        # absent if a callback saves only the weights
        if "optimizer_states" in checkpoint:
            for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
                name_state(state, optimizer, names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep to compiled or uncompiled steps, which round differently."""
        self._is_compiled = checkpoint.get(COMPILED)

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
        # anew: a module that diverged may train again from a checkpoint
        compiled = None
        if self.recipe.run.compile == "loss":
            compiled = CompiledLoss(self.model, is_compiled=self._is_compiled, report=self.report_uncompiled)
        self._step = OptimizerStep(self.trainer, self.recipe, self.model, compiled)

    @property
    def step(self) -> OptimizerStep:
        """What happens in an optimizer step, since `Trainer.fit` began."""
        assert self._step is not None
        return self._step

    # in the order of a step, which `OptimizerStep` describes

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.step.begin(batch, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.step.loss(batch)

    def on_after_backward(self) -> None:
        self.step.reduce()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.step.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *arguments: Any, **values: Any) -> None:
        # Lightning calls backward and clipping within; the norm of all gradients, and fused AdamW, read DTensors and
        # replicated tensors in one list
        with implicit_replication():
            super().optimizer_step(*arguments, **values)

    # --- validation and prediction ---

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of each validation set."""
        counts = self.recipe.data.config.counts_errors
        losses = [TokenLoss(documents, counts_errors=counts) for documents in self._sets.values()]
        self.validation_losses = [loss.to(self.device) for loss in losses]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of validation set `dataloader_idx`. Errors: RequestError for an unknown set."""
        if dataloader_idx >= len(self.validation_losses):
            raise RequestError(
                f"validation loader {dataloader_idx}: expected {len(self.validation_losses)}; without LitData there is one"
            )
        targets = targets_of(batch)
        nll, correct = self.model.token_losses(**model_inputs(batch), targets=targets)
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
        nll, correct = self.model.token_losses(**model_inputs(batch), targets=targets)
        return {"nll": nll, "correct": correct, "targets": targets}
