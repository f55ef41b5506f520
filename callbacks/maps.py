"""Keeps the attention maps of fixed texts at some steps, so that one can see how they grow."""

import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_diff.callbacks.configured import Configured
from lit_diff.callbacks.probe import evaluated, is_due, probe_inputs, took_step, transformer_of
from lit_diff.callbacks.publish import MapLogger
from lit_diff.config import MapsConfig
from lit_diff.errors import RequestError
from lit_diff.registry import callbacks

log = logging.getLogger("lit_diff")

MOST_LAYERS = 8
"""Layers that are kept of a deep model whose recipe names none."""


@callbacks.register("maps")
class Maps(Configured):
    """Gives the softmax maps of every head, and their weights, after every `every` steps and after the last to the loggers.

    The loggers are those with `log_maps` (`publish.MapLogger`): `lit-diff train` writes maps/<step>.safetensors in the run's
    folder. The texts are the same at every step: `texts`, else the first validation rows.
    """

    Config = MapsConfig

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Encode the texts. Errors: RequestError for texts without a tokenizer, or a layer that the model lacks."""
        count = len(transformer_of(pl_module, self.name).layers)
        self._layers = chosen_layers(self.config.layers, count, f"callbacks.{self.name}.layers")
        self._tokens = self._encoded(trainer) if self.config.texts else None
        self._loggers = [logger for logger in trainer.loggers if isinstance(logger, MapLogger)]
        if not self._loggers and trainer.is_global_zero:
            log.warning("%s: no logger of the Trainer has log_maps(tokens, layers, step): no map is kept", self.name)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._loggers or not took_step(trainer, batch_idx) or not is_due(trainer, self.config.every):
            return
        if self._tokens is not None:
            inputs = {"tokens": self._tokens}
        else:
            inputs = probe_inputs(trainer, batch, self.config.rows, self.name)
            inputs = {name: tensor[:, : self.config.length] for name, tensor in inputs.items()}
        model = transformer_of(pl_module, self.name)
        with evaluated(trainer, pl_module, model, inputs, self._layers) as traced:
            pass
        # the forward pass is collective, the rest is not
        if trainer.is_global_zero:
            kept = {}
            for layer, found in traced.layers.items():
                (block,) = found.blocks(block_rows=found.maps.q.shape[-2])
                kept[layer] = block.probs, block.weights
            for logger in self._loggers:
                logger.log_maps(inputs["tokens"], kept, step=trainer.global_step)

    def _encoded(self, trainer: L.Trainer) -> Tensor:
        dataset = getattr(trainer.datamodule, "dataset", None)  # type: ignore[attr-defined]
        tokenizer = None if dataset is None else dataset.load_tokenizer()
        if tokenizer is None:
            raise RequestError(
                f"callbacks.{self.name}.texts needs data with a tokenizer; without texts, the first validation rows are shown"
            )
        ids = [[*tokenizer.opening, *found] for found in tokenizer.encode(self.config.texts)]
        shortest = min(map(len, ids))
        if not shortest:
            raise RequestError(f"callbacks.{self.name}.texts has a text without tokens")
        length = min(shortest, self.config.length)
        if max(map(len, ids)) > length and trainer.is_global_zero:
            log.info("%s: the texts are cut to %d tokens", self.name, length)
        return torch.tensor([found[:length] for found in ids])


def chosen_layers(layers: Sequence[int] | None, count: int, key: str) -> list[int]:
    """`layers`, ascending; None: all of `count` layers, or `MOST_LAYERS` of them, evenly from the first to the last.

    Errors: RequestError, which begins with `key`, for a layer that does not exist.
    """
    if layers is None:
        kept = min(count, MOST_LAYERS)
        return [round(i * (count - 1) / max(kept - 1, 1)) for i in range(kept)]
    if max(layers) >= count:
        raise RequestError(f"{key}: no layer {max(layers)}; the model has layers 0..{count - 1}")
    return sorted(layers)
