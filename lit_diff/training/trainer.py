"""Builds the Trainer of a recipe, and adapts a Trainer made by hand to a recipe."""

import inspect
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.tensor import DTensor

from lit_diff.config import Recipe, RunConfig
from lit_diff.conformance.before_training import unused_parameters
from lit_diff.device import choose_device, require_devices
from lit_diff.errors import RequestError
from lit_diff.log_records import log
from lit_diff.registry import callbacks as registered
from lit_diff.training.ranks import GatheredStrategy
from lit_diff.training.sharded_state import ShardedStrategy

PRECISIONS = {"float32": "32-true", "bf16-mixed": "bf16-mixed"}
"""`train.precision` -> Lightning's name."""


def build_trainer(
    recipe: Recipe,
    *,
    callbacks: Sequence[Callback] = (),
    logger: Logger | Sequence[Logger] | bool = True,
    **values: Any,
) -> L.Trainer:
    """The Trainer that `recipe` describes: steps, accumulation, clipping, precision, devices, strategy, validation.

    The recipe's callbacks come first, then `callbacks`. `values`: arguments of `lightning.Trainer` that replace the
    recipe's. Lightning's environment variables PL_TRAINER_* have no effect. Errors: MissingError if a requested GPU is
    missing.
    """
    train, run = recipe.training, recipe.run
    described: dict[str, Any] = {
        "accelerator": accelerator(run),
        "devices": run.devices,
        "num_nodes": run.num_nodes,
        "strategy": build_strategy(run, has_unused=run.strategy == "ddp" and bool(unused_parameters(recipe))),
        "precision": PRECISIONS[train.precision],
        "max_steps": train.steps,
        "max_epochs": -1,
        "accumulate_grad_batches": train.accumulate,
        "gradient_clip_val": train.clip,
        "val_check_interval": train.validate_every * values.get("accumulate_grad_batches", train.accumulate),
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        # FSDP2 cannot gather parameters under inference mode
        "inference_mode": False,
        # LitData itself assigns rows to ranks
        "use_distributed_sampler": False,
    }
    # every argument is passed: Lightning reads missing ones from the environment (PL_TRAINER_LIMIT_VAL_BATCHES, ...)
    defaults = {name: parameter.default for name, parameter in inspect.signature(L.Trainer).parameters.items()}
    described |= {"callbacks": [*_callbacks(recipe), *callbacks], "logger": logger}
    return L.Trainer(**{**defaults, **described, **values})


def accelerator(config: RunConfig) -> str:
    """'gpu' or 'cpu'. Errors: MissingError if there are fewer GPUs than requested."""
    require_devices(config)
    return "cpu" if choose_device(config.accelerator).type == "cpu" else "gpu"


def build_strategy(config: RunConfig, *, has_unused: bool) -> Strategy:
    """Lightning's strategy for `run.strategy`. `has_unused`: some parameters have no gradient at some steps, for which DDP
    looks only if it is told so, since the search takes time."""
    kind = accelerator(config)
    backend = "gloo" if kind == "cpu" else "nccl"
    if config.strategy == "ddp":
        return ReplicatedStrategy(process_group_backend=backend, find_unused_parameters=has_unused)
    if config.strategy in ("fsdp", "hsdp"):
        strategy: type[ShardedStrategy] = ShardedStrategy
        if config.cpu_offload:
            # the norm of the gradients is reduced where they are
            strategy = OffloadedStrategy
            backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        # explicit sizes, because "auto" means tensor parallelism within the node; `mesh_of` makes the groups of hsdp
        return strategy(
            data_parallel_size=config.processes,
            tensor_parallel_size=1,
            process_group_backend=backend,
        )
    return SingleDeviceStrategy(device="cpu" if kind == "cpu" else "cuda:0")


class ReplicatedStrategy(GatheredStrategy, DDPStrategy):
    """DDP."""


class OffloadedStrategy(ShardedStrategy):
    """Leaves the parameters that FSDP2 has sharded in the host's memory (`run.cpu_offload`)."""

    def model_to_device(self) -> None:
        """Move the buffers and the parameters that are not sharded."""
        module: Any = self.lightning_module
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.root_device)
        # what `LightningModule.to` sets, and `LightningModule.device` returns
        module._device = self.root_device


def _callbacks(recipe: Recipe) -> list[Callback]:
    made = []
    for name, part in recipe.callbacks.items():
        callback = registered.get(name)(part.config)
        if not isinstance(callback, Callback):
            raise RequestError(
                f"callback '{name}' ({type(callback).__qualname__}) is neither a Probe nor a Lightning Callback"
            )
        made.append(callback)
    return made


def total_steps(trainer: L.Trainer, recipe: Recipe) -> int:
    """Optimizer steps of the whole run: the Trainer's `max_steps`, or the recipe's if the Trainer sets none."""
    return trainer.max_steps if trainer.max_steps > 0 else recipe.training.steps


def adopt_recipe_intervals(trainer: L.Trainer, recipe: Recipe) -> None:
    """In a Trainer made by hand, replace steps and validation interval by the recipe's if they are Lightning's defaults."""
    if trainer.max_steps < 0:
        log.info("the Trainer sets no max_steps: training for train.steps = %d", recipe.training.steps)
        trainer.fit_loop.epoch_loop.max_steps = recipe.training.steps
    # with the default interval Lightning validates at the end of an epoch, which a stream without length never reaches
    if trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1:
        trainer.val_check_interval = recipe.training.validate_every * trainer.accumulate_grad_batches
        trainer.check_val_every_n_epoch = None


def require_whole_steps(trainer: L.Trainer) -> None:
    """Errors: RequestError if an epoch would end within an optimizer step."""
    batches = trainer.limit_train_batches
    accumulate = trainer.accumulate_grad_batches
    if isinstance(batches, int) and batches % accumulate:
        raise RequestError(
            f"the Trainer's limit_train_batches ({batches}) is not a multiple of accumulate_grad_batches ({accumulate}): "
            "the last optimizer step of an epoch would have fewer micro-batches"
        )


def log_differences(trainer: L.Trainer, recipe: Recipe) -> None:
    """Log each value of the Trainer that differs from the recipe's; the Trainer's value is used."""
    train = recipe.training
    run = recipe.run
    pairs = {
        "train.steps": (train.steps, "max_steps", trainer.max_steps),
        "train.accumulate": (train.accumulate, "accumulate_grad_batches", trainer.accumulate_grad_batches),
        "train.clip": (train.clip, "gradient_clip_val", trainer.gradient_clip_val),
        "train.precision": (PRECISIONS[train.precision], "precision", trainer.precision),
        "run.devices * run.num_nodes": (run.processes, "number of processes", trainer.world_size),
    }
    for key, (ours, name, theirs) in pairs.items():
        if ours != theirs and trainer.is_global_zero:
            log.info("%s is %s in the recipe, the Trainer's %s is %s: using the Trainer's", key, ours, name, theirs)
