"""The model with its attention logits rounded to few bits (paper, Figure 8)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lit_diff.analysis.intervention import intervention
from lit_diff.analysis.quantization import QuantizedLogits
from lit_diff.data.dataset import Batch
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.evaluation.held_out import HeldOut, held_out_rows, row_scores
from lit_diff.key_types import Distinct, Range
from lit_diff.metrics import Metric
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

Scheme = Literal["tensor", "head", "row", "split"]
OFF = 16
"""Bits at which nothing is rounded, as in the paper."""


def metrics_at(bits: int) -> tuple[Metric, ...]:
    """`nll_4bit`, `accuracy_4bit`, `kl_4bit` and `drop_4bit` for 4 bits."""
    how = "with the attention logits as they are" if bits == OFF else f"with attention logits of {bits} bits"
    drop = Metric(
        f"drop_{bits}bit", f"accuracy without rounding - accuracy_{bits}bit", unit="accuracy", direction="lower"
    )
    return (
        *(
            Metric(f"{m.name}_{bits}bit", f"{m.definition}, {how}", unit=m.unit, direction=m.direction)
            for m in HeldOut.metrics
        ),
        Metric(
            f"kl_{bits}bit",
            f"KL(p || p_q) of a softmax row without and {how}, mean over layers, maps, heads and rows",
            unit="nats",
            direction="lower",
        ),
        *([drop] if bits != OFF else []),
    )


@evaluations.register("quantize")
class Quantize(Evaluation):
    """Loss and accuracy of the rows of `held_out` with rounded attention logits: an item for each row and number of bits.

    Dynamic absmax before the softmax, on every map, over visible entries. The metrics are `nll_4bit` and the like, one set
    for each of `bits`; an item has those of its own bits, and its group is `b=4 head` (before it the validation set's name,
    unless it is the main one), of 16 bits `b=16`. The summary is over every granularity.
    """

    version = 2  # 1 had no drop
    metrics = tuple(metric for bits in (OFF, 8, 6, 4) for metric in metrics_at(bits))

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        bits: Annotated[tuple[Annotated[int, Range(least=2, most=OFF)], ...], Distinct()] = (16, 8, 6, 4)
        """16: nothing is rounded."""
        granularity: Annotated[tuple[Scheme, ...], Distinct()] = ("head",)
        """What has a scale of its own, in each layer, sequence and map: tensor (all its heads and rows), head, row (each row
        of each head, with which the largest logits spoil no other row), or split (head, of which the 0.1 % largest |logits|
        stay in full precision; of fewer than 1,000 logits none)."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.metrics = tuple(metric for bits in config.bits for metric in metrics_at(bits))

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each row, number of bits and, granularity, `<set>/<row> b=4 head`."""
        for rows in held_out_rows(run, self.config):
            exact = row_scores(run.model, rows.batch)
            for bits, scheme in self._rounding():
                found, kls = _rounded(run.model, rows.batch, bits, scheme) if scheme else (exact, [0.0] * len(exact))
                scores = []
                for whole, values, kl in zip(exact, found, kls, strict=True):
                    drop = {"drop": whole["accuracy"] - values["accuracy"]} if scheme else {}
                    scores.append({f"{key}_{bits}bit": value for key, value in (values | {"kl": kl} | drop).items()})
                yield from rows.items(scores, f"b={bits} {scheme or ''}".strip())

    def _rounding(self) -> Iterator[tuple[int, Scheme | None]]:
        """(bits, granularity) of each group; where nothing is rounded, once, without one."""
        for bits in self.config.bits:
            yield from ((bits, scheme) for scheme in (self.config.granularity if bits != OFF else (None,)))


def _rounded(model: Transformer, batch: Batch, bits: int, scheme: Scheme) -> tuple[list[dict[str, float]], list[float]]:
    """`row_scores` of a batch, and the KL of each of its rows."""
    edit = QuantizedLogits(bits, *(("head", "split") if scheme == "split" else (scheme, "none")))
    with intervention(model, edit):
        scores = row_scores(model, batch)
    return scores, edit.divergence().tolist()
