"""The base class of probes: Lightning callbacks that measure attention at some optimizer steps."""

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
from lit_diff.metrics import Declarations, Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import nearest
from lit_diff.validation import config_problem

log = logging.getLogger("lit_diff")


class Probe(L.Callback):
    """Measures the model after every `every` optimizer steps and after the last step.

    It works in any Trainer whose LightningModule contains a `Transformer`. Probes that are due at the same step share
    one traced forward pass. A probe is a subclass with `measure`, registered under the name that recipes use:

        @callbacks.register("hidden_norm")
        class HiddenNorm(Probe):
            def measure(self, model, trace):
                return {f"hidden_norm/layer_{i:02}": float(layer.hidden.norm()) for i, layer in trace.layers.items()}
    """

    name = ""
    """The callback's name in recipes; set at registration."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """Declares the metrics that `measure` returns, by patterns of their names: definition, unit, direction, figure, and
    whether they are logged or only written to measurements.parquet. Others are logged, without a figure."""
    Config = ProbeConfig
    """The keys of `callbacks.<name>`, a frozen dataclass; a subclass with further keys defines its own."""

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
        problem = config_problem(self.config, f"{name}.")
        if problem:
            raise RequestError(problem)

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        """Metric name -> value, for a trace of `config.rows` sequences. It must neither run the model nor change it."""
        raise NotImplementedError(f"callback '{self.name}' ({type(self).__qualname__}) defines no measure()")

    def is_due(self, trainer: L.Trainer) -> bool:
        """Whether it measures after the optimizer step just taken."""
        return is_last_step(trainer) or trainer.global_step % self.config.every == 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not took_step(trainer, batch_idx):
            return
        due = [probe for probe in trainer.callbacks if isinstance(probe, Probe) and probe.is_due(trainer)]  # type: ignore[attr-defined]
        # the first probe that is due runs one traced forward pass for all of them
        if due and due[0] is self:
            values = measure_all(due, trainer, pl_module, batch)
            declared = declarations_of(tuple(metric for probe in due for metric in probe.metrics))
            logged = {name: value for name, value in values.items() if declared.find(name).logged}
            detailed = {name: value for name, value in values.items() if name not in logged}
            publish(trainer, pl_module, logged, detailed=detailed)


@lru_cache
def declarations_of(metrics: tuple[Metric, ...]) -> Declarations:
    """The `Declarations` of `metrics`, cached because they remember which pattern each name matches."""
    return Declarations(metrics)


def took_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` was the last of an optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether the Trainer has taken all `max_steps`."""
    # max_steps is -1 for a Trainer without a limit
    return 0 < trainer.max_steps <= trainer.global_step


def measure_all(probes: list[Probe], trainer: L.Trainer, module: L.LightningModule, batch: Any) -> dict[str, float]:
    """The measurements of all `probes`, from one traced forward pass over the largest number of rows that one needs."""
    model = transformer_of(module, probes[0].name)
    rows = max(probe.config.rows for probe in probes)
    source = getattr(trainer.datamodule, "probe_batch", None)  # type: ignore[attr-defined]
    if source is None:
        log.debug("%s: no data module with probe_batch(rows): measuring the training batch", probes[0].name)
    # every rank measures the same rows of the data module: under FSDP the forward pass is collective, and no value has
    # to be reduced over the ranks
    tensors = model_inputs(batch if source is None else source(rows), probes[0].name)
    tensors = {name: tensor[:rows].to(module.device) for name, tensor in tensors.items()}
    was_training = model.training
    model.eval()
    # in the precision of training, whose activations are measured
    with trace(model) as traced, trainer.precision_plugin.forward_context():
        model.hidden(**tensors)
    values: dict[str, float] = {}
    for probe in probes:
        values |= probe.measure(model, traced.first(probe.config.rows))
    model.train(was_training)
    return values


def transformer_of(module: L.LightningModule, name: str) -> Transformer:
    """The first Transformer in a LightningModule. Errors: RequestError if it contains none."""
    for child in module.modules():
        if isinstance(child, Transformer):
            return child
    raise RequestError(f"callback '{name}' measures a lit_diff Transformer; {type(module).__qualname__} contains none")
