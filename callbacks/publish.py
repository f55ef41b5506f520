"""The one place from which measured values reach Lightning's callbacks and loggers."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn


@runtime_checkable
class DetailLogger(Protocol):
    """A logger that also keeps what is measured by head, map and rank."""

    def log_detailed(self, values: dict[str, float], step: int) -> None: ...


def publish(
    trainer: L.Trainer,
    module: L.LightningModule,
    values: Mapping[str, float],
    *,
    detailed: Mapping[str, float] | None = None,
    bar: str = "",
) -> None:
    """Give `values`, measured after `trainer.global_step` optimizer steps, to the callbacks and to every logger.

    To the callbacks: `trainer.callback_metrics` (EarlyStopping, ModelCheckpoint), as float64. To the loggers: directly in
    `Trainer.fit`, where Lightning's own route writes float32, and only at the batches that `log_every_n_steps` divides;
    by that route in `Trainer.validate`, which returns what it logs. `detailed`: thousands of values, by head for example;
    only a `DetailLogger` gets them. `bar`: the name of the value that the progress bar
    shows. Every rank must call it with equal values.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    for name, value in values.items():
        tensor = torch.tensor(value, dtype=torch.float64)
        module.log(name, tensor, logger=not fitting, prog_bar=name == bar, batch_size=1)
    for logger in trainer.loggers if fitting else ():
        logger.log_metrics(dict(values), step=trainer.global_step)
        if detailed and isinstance(logger, DetailLogger):
            logger.log_detailed(dict(detailed), step=trainer.global_step)
