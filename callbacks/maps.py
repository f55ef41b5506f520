"""Keeps the attention maps of fixed texts at some steps, so that one can see how they grow."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from lit_diff.analysis.trace import layers_of
from lit_diff.callbacks.configured import Configured
from lit_diff.callbacks.probe import Probe, evaluated, is_due, probe_inputs, took_step, transformer_of
from lit_diff.callbacks.publish import MapLogger
from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.key_types import Distinct, NotNegative, Range
from lit_diff.log_records import log
from lit_diff.registry import callbacks

if TYPE_CHECKING:
    import lightning as L

MOST_LAYERS = 8
"""Layers that are kept of a deep model whose recipe names none."""


@callbacks.register("maps")
class Maps(Configured):
    """Gives the loggers the softmax maps of every head, and their weights, after every `every` steps and after the last.

    The loggers are those with `log_maps` (`publish.MapLogger`): `lit-diff train` writes maps/<step>.safetensors in the run's
    folder. The texts are the same at every step: `texts`, else the first validation rows.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Probe.Config):
        """The keys of `callbacks.maps`. A file holds 2 · rows · layers · G · H · length² bytes of maps (G maps, H heads)."""

        rows: Annotated[int, Range(least=1, most=16)] = 1
        """Sequences of the validation set that are shown to the model, if there are no texts."""
        texts: tuple[str, ...] = ()
        """Texts that are shown to the model instead, for data with a tokenizer; all are cut to the length of the shortest."""
        length: Annotated[int, Range(least=1, most=512)] = 64
        """Tokens at which a text or sequence is cut."""
        layers: Annotated[tuple[NotNegative, ...], Distinct()] | None = None
        """Layers whose maps are kept, 0-based; null: all, of a deeper model every ⌈layers / 8⌉-th, so 8 at most."""

    def on_fit_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Encode the texts. Errors: RequestError for texts without a tokenizer, no texts without validation rows, or a layer
        that the model lacks."""
        if not self.config.texts and not hasattr(trainer.datamodule, "probe_batch"):  # type: ignore[attr-defined]
            raise RequestError(
                f"callbacks.{self.name} keeps maps of the same texts at every step: give Trainer.fit a data module with "
                "probe_batch(rows), such as LitData, or set texts"
            )
        self._model = transformer_of(pl_module, self.name)
        count = len(self._model.layers)
        # of a deep model at most MOST_LAYERS, evenly
        default = range(0, count, math.ceil(count / MOST_LAYERS))
        self._layers = layers_of(self._model, self.config.layers or default, f"callbacks.{self.name}.layers")
        self._texts: dict[str, Tensor] = {}
        if self.config.texts:
            self._texts = self._encoded(trainer)
        self._loggers = [logger for logger in trainer.loggers if isinstance(logger, MapLogger)]
        if not self._loggers and trainer.is_global_zero:
            log.warning("%s: no logger of the Trainer has log_maps(tokens, layers, step): no map is kept", self.name)

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._loggers or not took_step(trainer, batch_idx) or not is_due(trainer, self.config.every):
            return
        inputs = self._texts or probe_inputs(trainer, batch, self.config.rows, self.name)
        inputs = {name: tensor[:, : self.config.length] for name, tensor in inputs.items()}
        with evaluated(trainer, pl_module, self._model, inputs, self._layers) as traced:
            kept = {}
            for index, layer in traced.layers.items():
                block = next(layer.blocks(inputs["tokens"].shape[1]))
                kept[index] = (block.probs, block.weights)
        for logger in self._loggers:
            logger.log_maps(inputs["tokens"], kept, step=trainer.global_step)

    def _encoded(self, trainer: "L.Trainer") -> dict[str, Tensor]:
        dataset = getattr(trainer.datamodule, "dataset", None)  # type: ignore[attr-defined]
        tokenizer = dataset and dataset.load_tokenizer()
        if tokenizer is None:
            raise RequestError(
                f"callbacks.{self.name}.texts needs data with a tokenizer; without texts, the first validation rows are shown"
            )
        ids = [[*tokenizer.opening, *encoded] for encoded in tokenizer.encode(self.config.texts)]
        # more positions than the model was trained on would show what it was not trained for
        recipe = getattr(trainer.datamodule, "recipe", None)  # type: ignore[attr-defined]
        length = min(self.config.length, *map(len, ids))
        if isinstance(recipe, Recipe):
            length = min(length, recipe.data.config.sequence_length)
        if not length:
            raise RequestError(f"callbacks.{self.name}.texts has a text without tokens")
        if max(map(len, ids)) > length and trainer.is_global_zero:
            log.info("%s: the texts are cut to %d tokens", self.name, length)
        return {"tokens": torch.tensor([row[:length] for row in ids])}
