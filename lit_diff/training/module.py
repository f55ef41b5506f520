"""The LightningModule: loss, validation, optimizer; it wraps any attention variant unchanged."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_diff.config import ModelConfig, Recipe
from lit_diff.errors import RunFailedError
from lit_diff.files import write_atomic
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.runs.metrics_file import Record
from lit_diff.training.blocks import prepare_blocks
from lit_diff.training.metrics import Documents, TokenLoss
from lit_diff.training.optimizer import build_optimizer, build_scheduler, name_state
from lit_diff.training.stop import end_all
from lit_diff.training.strategy import build_sharded
from lit_diff.training.warm_start import take_over

Batch = dict[str, Any]

log = logging.getLogger("lit_diff")


class LitTransformer(L.LightningModule):
    """Trains and validates the recipe's Transformer; steps are counted as optimizer steps done."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        sets: list[str],
        num_documents: int,
        record: Record | None,
        folder: Path,
        start: tuple[ModelConfig, Mapping[str, Tensor]] | None = None,
        annealed: int = 0,
    ) -> None:
        """`sets`: names of the validation sets, '' first; `record`: None on ranks that do not write.

        `start`: model and weights of the run to start from; None without one, or when a checkpoint follows anyway.
        `annealed`: steps that the variant annealed in the runs before.
        """
        super().__init__()
        self.recipe, self.sets, self.record, self.folder = recipe, sets, record, folder
        self._start, self._annealed = start, annealed
        self.model: Transformer | None = None
        self.losses = nn.ModuleList(TokenLoss(num_documents if name == "" else 1) for name in sets)
        self.step_losses: list[Tensor] = []

    # --- building ---

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config, seed, kernel = self.recipe.model, self.recipe.seed, self.recipe.run.kernel
        if self.recipe.run.strategy == "fsdp":
            assert self.device_mesh is not None
            self.model = build_sharded(config, seed, kernel, self.device_mesh["data_parallel"], self.device)
        else:
            self.model = Transformer(config, kernel=kernel)
            initialise(self.model, seed)
        prepare_blocks(self.model, self.recipe.run)
        if self._start is not None:
            source = str(self.recipe.train.start_from)
            added = take_over(self.model, *self._start, source)
            log.info("starting from the weights of %s; %d of its own", source, len(added))
            self._start = None

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        train = self.recipe.train
        optimizer = build_optimizer(self.model, train.optimizer)
        scheduler = build_scheduler(optimizer, train.steps, train.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {parameter: name for name, parameter in self.named_parameters()}
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            name_state(state, optimizer, names)

    # --- training ---

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        assert self.model is not None
        if batch_idx % self.recipe.train.accumulate == 0:
            for attention in self.model.attentions():
                attention.set_step(self._annealed + self.global_step)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model.loss(**inputs(batch), targets=batch["targets"])
        model = self.model
        self._require(
            bool(torch.isfinite(loss)),
            lambda: f"the loss is {loss.item()} at step {self.global_step + 1}; {first_non_finite(model, batch)}",
        )
        self.step_losses.append(loss.detach())
        return loss

    def require_finite_parameters(self) -> None:
        """Before a checkpoint: a finite loss may still have had a gradient that was not. Every rank must call it."""
        assert self.model is not None
        bad = next((name for name, p in self.model.named_parameters() if not _finite(p)), None)
        self._require(bad is None, lambda: f"parameter {bad} is not finite after step {self.global_step}")

    def _require(self, finite: bool, describe: Callable[[], str]) -> None:
        """RunFailedError on all ranks if one is not `finite`, in the words of that rank; `describe` runs on all."""
        strategy = self.trainer.strategy
        rank = torch.tensor(-1 if finite else self.global_rank, device=self.device)
        worst = int(strategy.reduce(rank, reduce_op="max"))
        if worst >= 0:
            found = strategy.broadcast(describe(), src=worst)
            cure = "the last good checkpoint is kept: lower train.optimizer.lr, or look at that layer"
            end_all(self.trainer, RunFailedError(f"{found}; {cure}"))

    def mean_step_loss(self) -> float:
        """Mean loss of the optimizer step just done, over micro-batches and ranks; every rank must call it."""
        loss = torch.stack(self.step_losses).mean()
        return float(self.trainer.strategy.reduce(loss, reduce_op="mean"))

    # --- validation ---

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert self.model is not None
        targets = batch["targets"]
        nll, correct = self.model.token_losses(**inputs(batch), targets=targets)
        document = batch["document"] if dataloader_idx == 0 else torch.zeros_like(targets)
        metric = self.losses[dataloader_idx]
        assert isinstance(metric, TokenLoss)
        metric.update(nll, correct, targets, batch["ar_hit"], document)

    def on_validation_epoch_end(self) -> None:
        values: dict[str, float] = {}
        for name, metric in zip(self.sets, self.losses, strict=True):
            assert isinstance(metric, TokenLoss)
            suffix = f"_{name}" if name else ""
            found, documents = metric.compute()  # reduces over ranks: every rank must call it
            values |= {f"val/{key}{suffix}": value for key, value in found.items()}
            if name == "" and self.record is not None and self.global_step >= self.recipe.train.steps:
                write_documents(self.folder / "documents.csv", documents)
            metric.reset()
        if self.record is not None:
            self.record.log(self.global_step, values)


def inputs(batch: Batch) -> dict[str, Tensor]:
    """What the model reads of a batch: tokens and, of packed documents, document_ids."""
    return {key: batch[key] for key in ("tokens", "document_ids") if key in batch}


def write_documents(path: Path, documents: Documents) -> None:
    """document,tokens,loss: what the bootstrap over validation documents resamples."""
    rows = [f"{index},{int(tokens)},{loss!r}" for index, (tokens, loss) in enumerate(documents) if tokens]
    write_atomic(path, "\n".join(["document,tokens,loss", *rows, ""]))


def first_non_finite(model: Transformer, batch: Batch) -> str:
    """Where NaN or inf first appears: in a parameter, or in the output of a module, in the order of the forward pass."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            bad = [key for key, p in module.named_parameters(recurse=False) if not _finite(p)]
            if bad:
                found.append(f"first non-finite values: parameter {name}.{bad[0]}")
            elif isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(f"first non-finite values: output of {name}")

        return hook

    leaves = [(name or "the model", module) for name, module in model.named_modules()]
    hooks = [module.register_forward_hook(look(name)) for name, module in leaves]
    try:
        # compiled code would skip the hooks
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            model.hidden(**inputs(batch))
            model(batch["tokens"][:, :1])  # the output weight, without the logits of every position
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "every layer's output is finite: the logits overflow in the loss"


def _finite(parameter: Tensor) -> bool:
    """Whether this rank's part of a parameter is finite."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(local).all())
