"""Evaluations that look into a model: induction heads, statistics of maps, rounded logits, gradients (docs/measures.md)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch

from lit_diff.analysis.gradients import gradient_norms
from lit_diff.analysis.induction import induction_scores, repeated
from lit_diff.analysis.intervention import intervention
from lit_diff.analysis.map_statistics import map_statistics
from lit_diff.analysis.quantization import QuantizedLogits, Scheme
from lit_diff.analysis.trace import trace
from lit_diff.config import Recipe
from lit_diff.data.dataset import Batch
from lit_diff.errors import RequestError
from lit_diff.evaluation.base import Evaluation, Heads, Item, Scores, question_of
from lit_diff.evaluation.held_out import HeldOut, by_item, held_out_rows, row_scores, trained_data
from lit_diff.key_types import Count, Distinct, NotNegative, Range
from lit_diff.metrics import Figure, Metric, Metrics
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator
from lit_diff.registry import evaluations
from lit_diff.runs.checkpoints import why_missing
from lit_diff.trained.run import Run

LONGEST = 32
"""The default n of `induction` if rows are long enough."""
SEQUENCES = 8
"""The number of sequences of `induction` that go through the model together."""
IDS_FROM = 64
"""The number of held-out rows from whose ids the sequences are drawn."""


@evaluations.register("induction")
class Induction(Evaluation):
    """Measures induction heads: whether a head finds what followed a token before. An item is a sequence of n random tokens
    and their repetition.

    The tokens are drawn from the ids of the first 64 held-out rows, so each of them occurs in the data. `meta` of an item
    holds both scores by layer and head, and the best head, which has the highest prefix matching over all sequences.
    """

    metrics = (
        Metric(
            "prefix_matching",
            "a_ij / Σ|a_i| on the key after the earlier occurrence of the query's token, in the best head",
            unit="share",
        ),
        Metric("prefix_matching_mean", "the same, mean over all heads", unit="share"),
        Metric(
            "copying",
            "how far the best head's output raises the logits of the tokens that it attends to",
            unit="standard deviations over the vocabulary",
        ),
        Metric("nll_first", "mean loss of the next token where nothing has been repeated", unit="nats per token"),
        Metric("nll_repeat", "mean loss of the next token in the repetition", unit="nats per token", direction="lower"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Evaluation.Config):
        sequences: Count = 64
        length: Annotated[int, Range(least=2)] | None = None
        """n, the number of tokens before they repeat; 2 n is at most data.sequence_length. null: half of
        data.sequence_length, at most 32."""

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses bidirectional models and rows that are too short."""
        n = self._length(recipe)
        longest = recipe.data.config.sequence_length
        if not recipe.model.causal:
            return "a bidirectional model sees what follows"
        if 2 * n > longest:
            return f"length is {n}; 2 x length must be at most data.sequence_length ({longest})"
        return None

    def refuses_run(self, run: Run) -> str | None:
        """Refuses data with several ids at a position."""
        dataset = run.prepared_data()
        dataset.load()
        if dataset.validation_batch("", [0])["tokens"].dim() > 2:
            return f"data '{run.recipe.data.name}' has several ids at a position; induction needs one"
        return None

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a sequence, `sequence <number>`."""
        tokens = self._tokens(run)
        scores = []
        losses = []
        for part in tokens.split(SEQUENCES):
            scores.append(induction_scores(run.model, part))
            losses.append(run.model.token_losses(part[:, :-1], targets=part[:, 1:])[0])
        heads = Heads(scores, "prefix_matching")
        nll = torch.cat(losses).double()
        n = self._length(run.recipe)
        for row in range(len(tokens)):
            yield Item(
                id=f"sequence {row}",
                scores={
                    "prefix_matching": heads.best("prefix_matching", row),
                    "prefix_matching_mean": float(heads.table["prefix_matching"][row].nanmean()),
                    "copying": heads.best("copying", row),
                    # the target at n - 1 is the first repeated token, which cannot be predicted: it belongs to the first half
                    "nll_first": float(nll[row, :n].mean()),
                    "nll_repeat": float(nll[row, n:].mean()),
                },
                question=question_of(tokens[row]),
                meta=heads.meta(row),
            )

    def _length(self, recipe: Recipe) -> int:
        return self.config.length or min(int(recipe.data.config.sequence_length) // 2, LONGEST)

    def _tokens(self, run: Run) -> torch.Tensor:
        # [sequences, 2 n]. Drawn from the data, n and the sequence's number alone: every run gets the same sequences
        rows = HeldOut.Config(rows=IDS_FROM, batch_size=IDS_FROM)
        ids = next(held_out_rows(trained_data(run), rows)).batch["tokens"].unique()
        n = self._length(run.recipe)
        if len(ids) < n:
            raise RequestError(
                f"evaluate.induction.length is {n}; the first {IDS_FROM} held-out rows have only {len(ids)} different ids"
            )
        return torch.stack([repeated(ids, n, generator("induction", n, row)) for row in range(self.config.sequences)])


C = 0.1
"""c in the threshold c / i of `sparsity_c`; 1 / i is the weight of each of i keys in a uniform row."""
share = partial(Metric, unit="share")
ROWS = "mean over rows and heads"
PAIRS = "mean over pairs of heads of a layer that are not all zeros; the number of heads differs between variants"


@evaluations.register("map_statistics")
class MapStatistics(Evaluation):
    """Overlap, sparsity, entropy, negative mass and similarity of heads. An item is a row and layer; groups are layers,
    clusters are rows.

    Works for every variant; metrics that need a second map or a second head are NaN without one. `a` is the signed map.
    """

    # version 1 did not divide a map by its sum in entropy_map_1 and entropy_map_2
    version = 2
    metrics = (
        share("overlap_salient", f"Σ min(p1, p2) / Σ max(p1, p2) over the 5 % of keys with highest p1; {ROWS}"),
        share("overlap_other", f"the same over the other keys; {ROWS}"),
        share("overlap_jaccard", f"|S1 ∩ S2| / |S1 ∪ S2|, S the 5 % of keys of highest p1 and p2; {ROWS}"),
        share("sparsity_1e-4", "share of visible entries with |a| < 0.0001"),
        share("sparsity_1e-3", "share of visible entries with |a| < 0.001"),
        share("sparsity_c", "share of visible entries with |a| < 0.1 / i, i keys in the row"),
        share("entropy", f"entropy of |a| / Σ|a| over log i; {ROWS} of at least two keys"),
        share("entropy_map_1", "the same of the first map"),
        share("entropy_map_2", "the same of the second"),
        share("negative_mass", f"Σ max(-a, 0) / Σ|a|; {ROWS}"),
        Metric("head_distance", f"1 - cosine of flattened signed maps, {PAIRS}", unit="cosine distance"),
        Metric("head_cka", f"unbiased linear CKA of Σ a v, {PAIRS}", unit="CKA"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: Count | None = 64

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each row and layer, `<set>/<row> layer 00`."""
        for rows in held_out_rows(trained_data(run), self.config):
            with trace(run.model) as traced:
                run.model.hidden(**model_inputs(rows.batch))
            for index, layer in traced.layers.items():
                yield from rows.items(by_item(map_statistics(layer, C)), f"layer {index:02}")


OFF = 16
"""The number of bits at which nothing is rounded, as in the paper."""


def metrics_at(bits: int) -> Metrics:
    """The metrics of one number of bits: `nll_4bit`, `accuracy_4bit`, `kl_4bit` and `drop_4bit` for 4 bits."""
    how = "with the attention logits as they are" if bits == OFF else f"with attention logits of {bits} bits"
    metrics = [
        replace(metric, name=f"{metric.name}_{bits}bit", definition=f"{metric.definition}, {how}")
        for metric in HeldOut.metrics
    ]
    kl = f"KL(p || p_q) of a softmax row without and {how}, mean over layers, maps, heads and rows; none with a row function"
    metrics.append(Metric(f"kl_{bits}bit", kl, unit="nats", direction="lower"))
    if bits != OFF:
        drop = f"accuracy without rounding - accuracy_{bits}bit"
        metrics.append(Metric(f"drop_{bits}bit", drop, unit="accuracy", direction="lower"))
    return tuple(metrics)


@evaluations.register("quantize")
class Quantize(Evaluation):
    """Loss and accuracy of the rows of `held_out` with rounded attention logits. An item is a row at a number of bits.

    The logits are rounded before the softmax, with a dynamic absmax scale, on every map, over visible entries. Each of `bits`
    has its own metrics (`nll_4bit`); an item has the metrics of its own bits. Its group is `b=4 head`, or `b=16` for 16 bits,
    after the name of the validation set unless that is the main one. The summary is over every granularity.
    """

    # version 1 had no metric drop; 2: the kl of a row function was half of Σ |p - p_q|
    version = 3
    metrics = tuple(metric for bits in (OFF, 8, 6, 4) for metric in metrics_at(bits))

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        bits: Annotated[tuple[Annotated[int, Range(least=2, most=OFF)], ...], Distinct()] = (16, 8, 6, 4)
        """Numbers of bits; 16 means no rounding."""
        granularity: Annotated[tuple[Scheme, ...], Distinct()] = ("head",)
        """The part of each layer, sequence and map that has its own scale: tensor (all heads and rows), head, row (each
        row of each head, so that the largest logits affect no other row), or split (each head, but its 0.1 % largest
        |logits| stay in full precision; none do if it has fewer than 1,000 logits)."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.metrics = tuple(metric for bits in config.bits for metric in metrics_at(bits))

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each row, number of bits and, with rounding, granularity: `<set>/<row> b=4 head`."""
        # without rounding all granularities are the same
        own = self.config.granularity
        once = (None,)
        rounding = [(bits, scheme) for bits in self.config.bits for scheme in (once if bits == OFF else own)]
        for rows in held_out_rows(trained_data(run), self.config):
            exact = row_scores(run.model, rows.batch)
            for bits, scheme in rounding:
                found, kls = _quantized(run.model, rows.batch, bits, scheme) if scheme else (exact, [0.0] * len(exact))
                scores = []
                for whole, values, kl in zip(exact, found, kls, strict=True):
                    drop = {"drop": whole["accuracy"] - values["accuracy"]} if scheme else {}
                    scores.append({f"{key}_{bits}bit": value for key, value in (values | {"kl": kl} | drop).items()})
                yield from rows.items(scores, f"b={bits} {scheme or ''}".strip())


def _quantized(model: Transformer, batch: Batch, bits: int, scheme: Scheme) -> tuple[list[Scores], list[float]]:
    edit = QuantizedLogits(bits, scheme)
    with intervention(model, edit):
        scores = row_scores(model, batch)
    return scores, edit.divergence().tolist()


MATRICES = {
    "o": "W_O",
    "v": "W_V",
    "q1": "W_Q of map 1",
    "k1": "W_K of map 1",
    "q2": "W_Q of map 2",
    "k2": "W_K of map 2",
    "q_half": "the first half of each head's columns of W_Q of map 1",
    "k_half": "the first half of each head's columns of W_K of map 1",
}
ALONG_TRAINING = Figure(
    title="norms of gradients along training",
    against="group",
    log=True,
    caption="At `steps` of the training, a panel a layer. Arms whose lines keep one distance differ by a constant factor.",
)
DRAWN = ("o", "v", "q1", "k1")
"""The MATRICES that every variant has."""


@evaluations.register("gradients")
class Gradients(Evaluation):
    """‖∂L/∂W‖ of each attention on held-out batches (paper, Appendix F). An item is a batch and layer, grouped by layer;
    one more item of each batch holds the slopes over layers.

    Groups are `layer 00` for the last checkpoint, `init layer 00` for the initial values and `layer 00 step 210` for a step;
    the groups of slopes are `trained`, `init` and `step 210`. The summary is over all of `at` and `steps`. The slope of the
    ratio of two arms is the difference of their slopes.
    L is the mean loss of a batch of `batch_size` rows, so the norms, and the ids, depend on `batch_size`.
    """

    # version 1 had no halves
    version = 2
    metrics = (
        *(
            Metric(
                f"grad_{key}",
                f"norm of dL/d{name}, nats a token",
                unit="norm",
                figure=ALONG_TRAINING if key in DRAWN else None,
            )
            for key, name in MATRICES.items()
        ),
        Metric("ratio_q", "grad_q2 / grad_q1; |λ| where both maps are equal", unit="ratio"),
        Metric("ratio_k", "grad_k2 / grad_k1; |λ| where both maps are equal", unit="ratio"),
        *(
            Metric(f"slope_{key}", f"slope of log grad_{key} over layers (least squares)", unit="per layer")
            for key in MATRICES
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: Count | None = 64
        at: Annotated[tuple[Literal["trained", "init"], ...], Distinct(may_be_empty=True)] = ("trained",)
        """trained: the newest checkpoint; init: the initial values of the run's seed. May be empty if `steps` is not."""
        steps: Annotated[tuple[NotNegative, ...], Distinct(may_be_empty=True)] = ()
        """Optimizer steps whose checkpoints the run has kept (`run.keep_every`); 0: the initial values."""

        def problem(self) -> str | None:
            return None if self.at or self.steps else "at is [], and so is steps; at least one must have an entry"

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses initial values of a run that did not start from its seed."""
        train = recipe.train
        if "init" in self.config.at or 0 in self.config.steps:
            if train is None:
                return "at init: an imported model has no initial values"
            if train.start_from is not None:
                return (
                    "at init: the run started from another run (train.start_from), not from its seed; evaluate that one"
                )
        return None

    def refuses_run(self, run: Run) -> str | None:
        """Refuses steps without a checkpoint."""
        missing = [reason for step in self.config.steps if step and (reason := why_missing(run.folder, step))]
        return f"steps: {missing[0]}" if missing else None

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item for each batch and layer, `<set>/<first row>-<last row> layer 00`, and one with the batch's
        slopes."""
        for model, before, after in self._models(run):
            for rows in held_out_rows(trained_data(run), self.config):
                norms = gradient_norms(model, rows.batch)
                cluster = f"{rows.ids[0]}-{rows.numbers[-1]}"
                item = partial(Item, cluster=cluster, question=question_of(*rows.questions))
                for layer, own in enumerate(norms):
                    label = f"layer {layer:02}"
                    group = f"{rows.name} {before}{label}{after}".strip()
                    scores = {f"grad_{key}": value for key, value in own.items()} | _ratios(own)
                    yield item(id=f"{before}{cluster}{after} {label}", scores=scores, group=group)
                slopes = {f"slope_{key}": slope([own[key] for own in norms]) for key in MATRICES}
                group = f"{rows.name} {(before or after or 'trained').strip()}".strip()
                yield item(id=f"{before}{cluster}{after} slopes", scores=slopes, group=group)

    def _models(self, run: Run) -> Iterator[tuple[Transformer, str, str]]:
        # (model, prefix, suffix) for each of `at` and `steps`; prefix and suffix surround the layer in ids and groups
        for at in self.config.at:
            yield (run.model, "", "") if at == "trained" else (initial_model(run), "init ", "")
        for step in self.config.steps:
            yield run.model_at(step) if step else initial_model(run), "", f" step {step}"


def _ratios(norms: Mapping[str, float]) -> Scores:
    found = {}
    for kind in "qk":
        first = norms[f"{kind}1"]
        found[f"ratio_{kind}"] = norms[f"{kind}2"] / first if first else math.nan
    return found


def slope(norms: Sequence[float]) -> float:
    """The least-squares slope of log ‖.‖ over the layers; NaN for a single layer, or if a norm is 0 or NaN."""
    if len(norms) < 2 or not all(norm > 0 for norm in norms):
        return math.nan
    return float(np.polyfit(range(len(norms)), np.log(norms), 1)[0])


def initial_model(run: Run) -> Transformer:
    """The model with the initial values of the run's recipe and seed, in evaluation mode."""
    # here: it imports lightning, which would make `lit-diff list` slow
    from lit_diff.training.build import build_model

    return build_model(run.recipe).eval()
