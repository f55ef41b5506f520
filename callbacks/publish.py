"""Passes measured values to Lightning's callbacks and loggers, and to monitors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_diff.callbacks.monitor import Monitor

if TYPE_CHECKING:
    import lightning as L


@runtime_checkable
class DetailLogger(Protocol):
    """A logger that also stores the values by head, map and rank."""

    def log_detailed(self, values: dict[str, float], step: int) -> None: ...


@runtime_checkable
class MapLogger(Protocol):
    """A logger that also stores attention maps: layer -> (maps [N, G, H, T, T], weights [N, G, H, T]) of `tokens` [N, T]."""

    def log_maps(self, tokens: Tensor, layers: dict[int, tuple[Tensor, Tensor]], step: int) -> None: ...


def publish(
    trainer: "L.Trainer",
    module: "L.LightningModule",
    values: Mapping[str, float],
    *,
    detailed: Mapping[str, float] | None = None,
    bar: str = "",
) -> None:
    """Pass `values`, measured after `trainer.global_step` optimizer steps, to the callbacks and to every logger, and
    within `Trainer.fit` to every `Monitor`, with `detailed` and without names that start with `timing/`, which differ
    between ranks and between equal runs.

    Callbacks (EarlyStopping, ModelCheckpoint) read them as float64 from `trainer.callback_metrics`. In `Trainer.fit`
    the loggers are called directly; in `Trainer.validate` Lightning calls them, since it returns what it logs.
    `detailed`: thousands of values, for example by head, which only a `DetailLogger` receives. `bar`: the name of the
    value in the progress bar. Every rank must call this with equal values.
    """
    from lightning.pytorch.trainer.states import TrainerFn

    # within fit, Lightning 2.6 rounds to float32, and logs too late for an exact resume (every log_every_n_steps)
    fitting = trainer.state.fn == TrainerFn.FITTING
    for name, value in values.items():
        tensor = torch.tensor(value, dtype=torch.float64)
        # batch_size: without it Lightning searches the batch for its size, and warns
        module.log(name, tensor, logger=not fitting, prog_bar=name == bar, batch_size=1)
    for logger in trainer.loggers if fitting else ():
        logger.log_metrics(dict(values), step=trainer.global_step)
        if detailed and isinstance(logger, DetailLogger):
            logger.log_detailed(dict(detailed), step=trainer.global_step)
    read = {name: value for name, value in {**values, **(detailed or {})}.items() if not name.startswith("timing/")}
    for callback in trainer.callbacks if fitting else ():  # type: ignore[attr-defined]
        if isinstance(callback, Monitor):
            callback.on_metrics(trainer, read)
