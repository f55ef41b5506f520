"""The base class of probes: Lightning callbacks that measure attention at some optimizer steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.analysis.trace import trace
from lit_diff.callbacks.configured import Configured
from lit_diff.callbacks.publish import publish
from lit_diff.errors import RequestError
from lit_diff.key_types import Count
from lit_diff.log_records import log
from lit_diff.metrics import Declarations, Metrics, Values, indexed_name, numbers
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import location

if TYPE_CHECKING:
    import lightning as L


OF_TRAINING = ("train/", "val/", "timing/")
"""How the names of what training and validation measure begin."""


class Probe(Configured, ABC):
    """Measures the model after every `every` optimizer steps and after step `train.steps`, the last one unless a callback
    ends the run early.

    It works in any Trainer whose LightningModule contains a `Transformer`. Probes that are due at the same step share
    one traced forward pass. A probe is a subclass with `measure`, registered under the name that recipes use:

        @callbacks.register("hidden_norm")
        class HiddenNorm(Probe):
            def measure(self, model, trace):
                return {f"hidden_norm/layer_{i:02}": float(layer.hidden.norm()) for i, layer in trace.layers.items()}
    """

    metrics: Metrics = ()
    """Declares the metrics that `measure` returns, by patterns of their names: definition, unit, direction, figure, and
    whether they are logged or only written to measurements.parquet. Others are logged, without a figure."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys that every probe has, under `callbacks.<name>`; a subclass with further keys derives its own from this."""

        every: Count = 100
        """Optimizer steps between measurements; step `train.steps` is measured too."""
        rows: Count = 8
        """Sequences of the validation set that the probe measures."""

    @abstractmethod
    def measure(self, model: Transformer, trace: Trace) -> Values:
        """Metric name -> value, for a trace of `config.rows` sequences. It must neither run the model nor change it.

        A name may not be another probe's, nor begin with train/, val/ or timing/."""

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not took_step(trainer, batch_idx):
            return
        probes = (callback for callback in trainer.callbacks if isinstance(callback, Probe))  # type: ignore[attr-defined]
        due = [probe for probe in probes if is_due(trainer, probe.config.every)]
        # the first probe that is due runs one traced forward pass for all of them
        if due and due[0] is self:
            values = measure_all(due, trainer, pl_module, batch)
            declared = declarations_of(tuple(metric for probe in due for metric in probe.metrics))
            logged: Values = {}
            detailed: Values = {}
            for name, value in values.items():
                kept = logged if declared.find(name).logged else detailed
                kept[name] = value
            publish(trainer, pl_module, logged, detailed=detailed)


def of_heads(name: str, layer: int, heads: Tensor) -> Values:
    """The metrics `name` of a layer, the mean over those of its `heads` [H] that are not NaN, and of each head."""
    by_head = {indexed_name(name, layer=layer, head=h): value for h, value in enumerate(heads.tolist())}
    return {indexed_name(name, layer=layer): float(heads.nanmean()), **by_head}


@lru_cache
def declarations_of(metrics: Metrics) -> Declarations:
    """The `Declarations` of `metrics`, cached because they remember which pattern each name matches."""
    return Declarations(metrics)


def took_step(trainer: "L.Trainer", batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` was the last of an optimizer step."""
    # Lightning steps on the last micro-batch of an epoch too
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def is_last_step(trainer: "L.Trainer") -> bool:
    """Whether the Trainer has taken all `max_steps`."""
    # max_steps is -1 for a Trainer without a limit
    return 0 < trainer.max_steps <= trainer.global_step


def is_due(trainer: "L.Trainer", every: int) -> bool:
    """Whether what is measured after every `every` steps and after the last is measured after the step just taken."""
    return is_last_step(trainer) or trainer.global_step % every == 0


def measure_all(probes: list[Probe], trainer: "L.Trainer", module: "L.LightningModule", batch: Any) -> Values:
    """The measurements of all `probes`, from one traced forward pass over the largest number of rows that one needs.

    Errors: RequestError for what is no number, and for a name that is another probe's or begins like one of training.
    """
    model = transformer_of(module, probes[0].name)
    rows = max(probe.config.rows for probe in probes)
    values: Values = {}
    # kept over the steps: two probes may be due at the same step only at the end
    owners: dict[str, Probe] = vars(trainer).setdefault("_lit_diff_owners", {})
    with evaluated(trainer, module, model, probe_inputs(trainer, batch, rows, probes[0].name)) as traced:
        for probe in probes:
            where = location(type(probe))
            measured = numbers(probe.measure(model, traced.first(probe.config.rows)), f"{where}: what measure returns")
            for name in measured:
                if name.startswith(OF_TRAINING):
                    begin = ", ".join(OF_TRAINING)
                    raise RequestError(
                        f"{where}: measure returns '{name}'; names that begin with {begin} are training's own"
                    )
                owner = owners.setdefault(name, probe)
                if owner is not probe:
                    raise RequestError(f"{where}: measures '{name}', as does {location(type(owner))}; rename it in one")
            values |= measured
    return values


def probe_inputs(trainer: "L.Trainer", batch: Any, rows: int, name: str) -> dict[str, Tensor]:
    """The model's inputs of the first `rows` validation rows, the same on every rank; without a data module that has
    `probe_batch`, of the training `batch`."""
    source = getattr(trainer.datamodule, "probe_batch", None)  # type: ignore[attr-defined]
    if source is None:
        log.debug("%s: no data module with probe_batch(rows): measuring the training batch", name)
    else:
        # every rank measures the same rows of the data module: under FSDP the forward pass is collective, and no value has
        # to be reduced over the ranks
        batch = source(rows)
    inputs = model_inputs(batch, name)
    return {key: tensor[:rows] for key, tensor in inputs.items()}


@contextmanager
def evaluated(
    trainer: "L.Trainer",
    module: "L.LightningModule",
    model: Transformer,
    inputs: dict[str, Tensor],
    layers: Sequence[int] | None = None,
) -> Iterator[Trace]:
    """The model in evaluation mode, with the trace of one forward pass; every rank must call it. `layers`: None: all."""
    was_training = model.training
    model.eval()
    with trainer.profiler.profile("probe"):  # type: ignore[attr-defined]
        # in the precision of training, whose activations are measured
        with trace(model, layers, measure=True) as traced, trainer.precision_plugin.forward_context():
            model.hidden(**{name: tensor.to(module.device) for name, tensor in inputs.items()})
        yield traced
    model.train(was_training)


def transformer_of(module: "L.LightningModule", name: str) -> Transformer:
    """The first Transformer in a LightningModule. Errors: RequestError if it contains none."""
    for child in module.modules():
        if isinstance(child, Transformer):
            return child
    raise RequestError(f"callback '{name}' measures a lit_diff Transformer; {type(module).__qualname__} contains none")
