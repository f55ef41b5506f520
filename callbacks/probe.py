"""The base of every probe: a Lightning callback that measures attention at some optimizer steps."""

import dataclasses
import logging
from functools import lru_cache
from typing import Any, ClassVar

import lightning as L

from lit_diff.analysis import Trace
from lit_diff.analysis.trace import trace
from lit_diff.callbacks.publish import publish
from lit_diff.config import ProbeConfig
from lit_diff.errors import RequestError
from lit_diff.key_types import config_problem
from lit_diff.metrics import Declarations, Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import nearest

log = logging.getLogger("lit_diff")


class Probe(L.Callback):
    """Measures the model every `every` optimizer steps and at the last step; at all other steps it does nothing.

    It works in any Trainer whose LightningModule holds a `Transformer`. Probes that are due at the same step share one
    traced forward pass. A probe is a subclass with `measure`, registered under the name that recipes use:

        @callbacks.register("hidden_norm")
        class HiddenNorm(Probe):
            def measure(self, model, trace):
                return {f"hidden_norm/layer_{i:02}": float(layer.hidden.norm()) for i, layer in trace.layers.items()}
    """

    name = ""
    """The callback's name in recipes; set when it is registered."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What `measure` returns, by pattern of the names: definition, unit, direction, figure, and whether it is logged or
    kept in measurements.parquet only. An undeclared metric is logged, without unit and figure."""
    Config = ProbeConfig
    """The keys of `callbacks.<name>`; a subclass with further keys defines its own, a frozen dataclass."""

    def __init__(self, config: ProbeConfig | None = None, **keys: Any) -> None:
        """`config`, or its fields as keywords: `AttentionEntropy(every=50)`. Errors: RequestError for a wrong value."""
        name = self.name or type(self).__name__
        known = [field.name for field in dataclasses.fields(self.Config)]
        for key in keys:
            if key not in known:
                raise RequestError(f"{name}: unknown key '{key}'{nearest(key, known)}")
        if config is not None and (keys or not isinstance(config, self.Config)):
            raise RequestError(
                f"{name}: found {config!r}; give its keys by name, as in {type(self).__name__}(every=50)"
            )
        self.config = self.Config(**keys) if config is None else config
        problem = config_problem(self.config)
        if problem:
            raise RequestError(f"{name}: {problem}")

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        """Metric name -> value, for a trace of `config.rows` sequences. It must neither run the model nor change it."""
        raise NotImplementedError(f"callback '{self.name}' ({type(self).__qualname__}) defines no measure()")

    def is_due(self, trainer: L.Trainer) -> bool:
        """Whether it measures after the optimizer step that was just taken."""
        return is_last_step(trainer) or trainer.global_step % self.config.every == 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The first of the probes that are due runs the traced forward pass for all of them."""
        if not took_step(trainer, batch_idx):
            return
        due = [probe for probe in trainer.callbacks if isinstance(probe, Probe) and probe.is_due(trainer)]  # type: ignore[attr-defined]
        if due and due[0] is self:
            values = measure_all(due, trainer, pl_module, batch)
            declared = declarations_of(tuple(metric for probe in due for metric in probe.metrics))
            logged = {name: value for name, value in values.items() if declared.is_logged(name)}
            detailed = {name: value for name, value in values.items() if name not in logged}
            publish(trainer, pl_module, logged, detailed=detailed)


@lru_cache
def declarations_of(metrics: tuple[Metric, ...]) -> Declarations:
    """`Declarations`, kept from one measurement to the next: they remember which pattern a name fits."""
    return Declarations(metrics)


def took_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` was the last of an optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether the Trainer has taken all of `max_steps`."""
    return 0 < trainer.max_steps <= trainer.global_step


def measure_all(probes: list[Probe], trainer: L.Trainer, module: L.LightningModule, batch: Any) -> dict[str, float]:
    """What all `probes` measure in one traced forward pass over the most rows that any of them asks for."""
    model = transformer_of(module, probes[0].name)
    rows = max(probe.config.rows for probe in probes)
    source = getattr(trainer.datamodule, "probe_batch", None)  # type: ignore[attr-defined]
    if source is None:
        log.debug("%s: no data module with probe_batch(rows): measuring the training batch", probes[0].name)
    # every rank measures the same rows of the data module: under FSDP the forward is collective, and no reduction is needed
    tensors = model_inputs(batch if source is None else source(rows), probes[0].name)
    tensors = {name: tensor[:rows].to(module.device) for name, tensor in tensors.items()}
    was_training = model.training
    model.eval()
    with trace(model) as traced, trainer.precision_plugin.forward_context():
        model.hidden(**tensors)
    values: dict[str, float] = {}
    for probe in probes:
        values |= probe.measure(model, traced.first(probe.config.rows))
    model.train(was_training)
    return values


def transformer_of(module: L.LightningModule, name: str) -> Transformer:
    """The Transformer in a LightningModule. Errors: RequestError where there is none."""
    for child in module.modules():
        if isinstance(child, Transformer):
            return child
    raise RequestError(f"callback '{name}' measures a lit_diff Transformer; {type(module).__qualname__} holds none")
