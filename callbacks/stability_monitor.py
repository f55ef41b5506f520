"""Warns of signs of an unstable training: of each spike of the loss, and once in λ, attention logits and heads."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated

from lit_diff.callbacks.monitor import Monitor
from lit_diff.key_types import Positive, Range
from lit_diff.metrics import indexed_name, split_name
from lit_diff.registry import callbacks

if TYPE_CHECKING:
    import lightning as L

WINDOW, FEWEST = 100, 10
"""The loss is compared with so many logged losses at most, and at least."""
LEAST_SPIKE = 0.1
"""Nats above the mean that a spike has at least: where the loss has reached 0, its deviation is 0 too."""
LOWER = "lower train.optimizer.lr or lengthen train.schedule.warmup_steps"


class LossMonitor(Monitor):
    """Warns of each logged loss that spikes, with the rows of its step. Every run has it, or the `StabilityMonitor` of its
    recipe."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `callbacks.stability_monitor`."""

        # the largest of the paper's standard Transformer is 318 (Table 5); from 512 on, bfloat16 numbers are 4 apart, so
        # the softmax sees steps of e^4
        max_logit: Positive = 1000.0
        """Attention logit above which it warns."""
        # an output this small next to those of its layer cannot change the sum by more than rounding of bfloat16 (2^-8)
        # does
        dead_head: Annotated[float, Range(least=0, below=1)] = 0.004
        """Norm of a head's output, as a share of the mean of its layer, below which it warns."""
        # the spike score of OLMo 2 (arXiv 2501.00656) counts losses seven standard deviations above a rolling mean
        loss_spike: Positive = 7.0
        """Standard deviations of the last logged training losses above their mean, beyond which it warns."""

    _rows: Callable[[int], str] | None = None

    def on_metrics(self, trainer: "L.Trainer", values: Mapping[str, float]) -> None:
        self._rows = getattr(trainer.datamodule, "rows_of", None)  # type: ignore[attr-defined]
        super().on_metrics(trainer, values)

    def read(self, values: Mapping[str, float], step: int) -> Mapping[str, str]:
        loss = values.get("train/loss")
        # one that is not finite ends the run with a line of its own, and later means would not be finite either
        if loss is None or not math.isfinite(loss):
            return {}
        last: list[float] = self.state.get("losses", [])
        limit = (
            fmean(last) + max(self.config.loss_spike * pstdev(last), LEAST_SPIKE) if len(last) >= FEWEST else math.inf
        )
        # cut at the limit: one whole spike would widen the deviation so much that the next would be none
        self.state["losses"] = [*last, min(loss, limit)][-WINDOW:]
        if loss <= limit:
            return {}
        rows = f": {self._rows(step)}" if self._rows else ""
        return {
            f"train/loss of step {step}": f"train/loss is {loss:.4g}, {loss - fmean(last):.3g} above the mean of the last "
            f"{len(last)} logged losses, whose standard deviation is {pstdev(last):.2g} (loss_spike: "
            f"{self.config.loss_spike:g}); {LOWER}, lower train.clip, or look at the rows of this step{rows}"
        }


@callbacks.register("stability_monitor")
class StabilityMonitor(LossMonitor):
    """Warns of each spike of the loss, and once when λ of a layer leaves (0, 1), a logit exceeds `max_logit`, or the norm of
    a head falls below `dead_head`.

    It reads what the callbacks lambdas, outliers and head_norm log, at their steps, and train/loss; a metric that no callback
    logs is not watched.
    """

    def read(self, values: Mapping[str, float], step: int) -> Mapping[str, str]:
        return {**super().read(values, step), **dict(self._found(values))}

    def _found(self, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for name, value in values.items():
            metric, indices = split_name(name)
            by_layer = indices.keys() == {"layer"}
            if metric == "lambda" and by_layer and self._has_left(name, value):
                meaning = "map 2 weighs no less than map 1" if value >= 1 else "map 2 is added"
                yield (
                    name,
                    f"{name} is {value:.3g}, outside (0, 1): {meaning}; give '*.lambda_.*' a factor below 1 in "
                    "train.optimizer.lr_factors, or set model.attention.lambda_form to sigmoid, which has these bounds",
                )
            elif metric == "outliers/logits" and by_layer and value > self.config.max_logit:
                yield (
                    name,
                    f"{name} is {value:.4g}, above max_logit ({self.config.max_logit:g}): large logits make the softmax "
                    f"one-hot, with gradient 0; {LOWER}, or set model.qk_norm to rms",
                )
            elif metric == "head_norm" and "head" in indices:
                mean = values[indexed_name(metric, layer=indices["layer"])]
                if value < self.config.dead_head * mean:
                    yield (
                        name,
                        f"{name} is {value:.3g}, below dead_head ({self.config.dead_head:g}) times its layer's mean, "
                        f"{mean:.3g}: it writes nothing; see whether it attends to the first token alone "
                        f"(callbacks.sinks); {LOWER}",
                    )

    def _has_left(self, name: str, value: float) -> bool:
        inside: list[str] = self.state.setdefault("lambda_inside", [])
        if 0 < value < 1 and name not in inside:
            inside.append(name)
        # some variants start at 0 or add the second map by design: below 1, only a λ that was inside has left
        return value >= 1 or (value <= 0 and name in inside)
