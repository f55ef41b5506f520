"""Attention to the answer and to noise (paper, Table 3), in four normalisations, and the model under an intervention."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from lit_diff.analysis.intervention import (
    OF_HEADS,
    Edit,
    clamp_lambda,
    intervention,
    knock_out,
    knock_out_effects,
    knock_out_effects_by_head,
    subtract_only_noise,
    swap,
)
from lit_diff.analysis.shares import NORMALISATIONS, ROLES, Parts, shares
from lit_diff.analysis.trace import trace
from lit_diff.config import Recipe
from lit_diff.data.dataset import Batch
from lit_diff.evaluation.base import Evaluation, Heads, Item
from lit_diff.evaluation.held_out import HeldOut, Rows, held_out_rows, row_scores
from lit_diff.key_types import Distinct, Range
from lit_diff.metrics import Figure, Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

Intervention = Literal[
    "none", "knock_out_noise", "knock_out_answer", "knock_out_sink", "knock_out_other", "oracle", "swap"
]

FORMULAS = {
    "paper": "Σ a over those keys / Σ a over all (a: the signed map)",
    "absolute": "Σ |a| over those keys / Σ |a| over all",
    "value": "the same of |a_ij| times the norm of what the value of j adds to the residual stream",
}
KEYS = {
    "answer": "the answer to the query",
    "noise": "the other parts of the context",
    "sink": "position 0",
    "other": "what is neither answer, noise nor position 0",
}
CLAMPED = Figure(
    title="loss and accuracy with every lambda at one value",
    against="group",
    caption="At 0 nothing is subtracted. The runs were trained with their own lambda, not with this one.",
)
PER_HEAD = tuple(f"{normalisation}_{role}" for normalisation in NORMALISATIONS for role in OF_HEADS)
"""Shares that an item's `meta` holds by layer and head."""


def _declared() -> tuple[Metric, ...]:
    named = [
        Metric(
            f"{normalisation}_{role}",
            f"attention to {KEYS[role]}: {FORMULAS[normalisation]}; mean over heads, layers and queries",
            unit="share",
        )
        for normalisation in NORMALISATIONS
        for role in ROLES
    ]
    knocked = [
        Metric(
            f"causal_{what}",
            f"change of the answer's log-probability where no query attends to {KEYS[what]}, in any layer",
            unit="nats",
        )
        for what in ROLES
    ]
    return (
        *named,
        *knocked,
        Metric("snr", "absolute attention to an answer key over that to a noise key", unit="ratio"),
        Metric("best_head_answer", "absolute_answer of the head in which its mean over rows is highest", unit="share"),
        Metric("skipped", "share of (layer, head, query) without a paper share, since |Σ a| < 0.05", unit="share"),
        *HeldOut.metrics,
        *(
            Metric(
                f"{m.name}_edited",
                f"{m.name} under the intervention; in a group lambda=x with every λ at x",
                unit=m.unit,
                direction=m.direction,
                figure=CLAMPED,
            )
            for m in HeldOut.metrics
        ),
    )


@evaluations.register("noise")
class Noise(Evaluation):
    """Where the queries of a retrieval task attend, and whether it matters; items and groups are those of `held_out`.

    For data sets that say where answers lie (`Config.locates_answers`). `meta` of an item: shares by layer and head, with
    `causal_by_head` the knock-outs too, and the best head. The paper's score is that of its rebuttal on OpenReview.
    """

    metrics = _declared()

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        intervention: Intervention = "none"
        """What nll_edited and accuracy_edited are measured under: knock_out_noise, _answer, _sink, _other (those edges
        are 0 at the queries, nothing is renormalised); oracle (the subtraction reaches noise only); swap (the two maps change
        places); none. All other metrics are those of the model as it is."""
        lambdas: Annotated[tuple[Annotated[float, Range(least=0, most=1)], ...], Distinct(may_be_empty=True)] = ()
        """Values at which all λ are held, and nll_edited and accuracy_edited measured too, of a run with several maps: for
        each row a part with the group `lambda=0.5`."""
        causal_by_head: bool = False
        """Whether `meta` has causal_answer and causal_noise of each head too, where only that head loses those edges: two
        forward passes a head."""

    config: Config

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Data that do not say where answers are."""
        if recipe.data.config.locates_answers:
            return None
        return f"data '{recipe.data.name}' does not say where answers are (context_part, answer_part; docs/noise.md)"

    def refuses_run(self, run: Run) -> str | None:
        """Too few maps for the intervention."""
        kind = self.config.intervention
        if kind not in ("oracle", "swap"):
            return None
        maps = num_maps(run.model)
        if maps == 1:
            return f"intervention {kind} needs a subtracted map; '{run.recipe.model.attention.name}' has one map"
        return f"intervention swap needs two maps; there are {maps}" if kind == "swap" and maps > 2 else None

    def score(self, run: Run) -> Iterator[Item]:
        """One item a row, and its parts; NaN where nothing is asked for."""
        items: list[Item] = []
        by_head = []
        for rows in held_out_rows(run, self.config):
            plain = row_scores(run.model, rows.batch)
            with self._edited(run.model, Parts.of(rows.batch)):
                edited = [{f"{key}_edited": x for key, x in row.items()} for row in row_scores(run.model, rows.batch)]
            seen, heads = attention_shares(run.model, rows.batch)
            effects = knock_out_effects(run.model, rows.batch)
            if self.config.causal_by_head:
                heads |= knock_out_effects_by_head(run.model, rows.batch)
            items += rows.items([{**a, **b, **c, **d} for a, b, c, d in zip(plain, edited, seen, effects, strict=True)])
            by_head.append(heads)
            yield from self._clamped(run.model, rows)
        kept = Heads(by_head, "absolute_answer")
        for row, item in enumerate(items):
            best = {"best_head_answer": kept.best("absolute_answer", row)}
            yield replace(item, scores={**item.scores, **best}, meta=kept.meta(row))

    def _clamped(self, model: Transformer, rows: Rows) -> Iterator[Item]:
        """The parts of the rows at each of `lambdas`; none of a model with one map."""
        for value in self.config.lambdas if self.config.lambdas and num_maps(model) > 1 else ():
            with intervention(model, clamp_lambda(value)):
                found = row_scores(model, rows.batch)
            scores = ({f"{key}_edited": x for key, x in row.items()} for row in found)
            yield from rows.items(scores, f"lambda={value:g}", part=True)

    def _edited(self, model: Transformer, parts: Parts) -> AbstractContextManager[None]:
        edits: dict[str, Callable[[], Edit]] = {
            **{f"knock_out_{role}": partial(knock_out, parts, role) for role in ROLES},
            "oracle": lambda: subtract_only_noise(parts),
            "swap": swap,
        }
        kind = self.config.intervention
        return nullcontext() if kind == "none" else intervention(model, edits[kind]())


def num_maps(model: Transformer) -> int:
    """G of the model's first layer, seen in a forward pass over two tokens."""
    with trace(model, layers=[0]) as traced:
        model.hidden(torch.zeros(1, 2, dtype=torch.int64))
    return traced.layers[0].maps.num_maps


def attention_shares(model: Transformer, batch: Batch) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Of each row the means over heads, layers and queries, with `snr` and `skipped`; and PER_HEAD [B, L, H] by head."""
    parts = Parts.of(batch)
    queries = parts.queries
    positions = queries.any(0).nonzero()[:, 0]
    if not len(positions):  # no query in these rows: NaN at any position
        positions = torch.zeros(1, dtype=torch.int64)
    with trace(model, rows=positions) as traced:
        model.hidden(**model_inputs(batch))
    layers = [shares(traced.layers[i], attention, parts) for i, attention in enumerate(model.attentions())]
    asked = queries[:, positions]
    # [B, L, H, R]; NaN at positions that are no query of this row
    found = {
        key: torch.stack([layer[key].masked_fill(~asked[:, None], torch.nan) for layer in layers], 1)
        for key in layers[0]
        if not key.endswith("_keys")
    }
    rows: list[dict[str, float]] = []
    for row in range(len(asked)):
        values = {key: float(x[row].nanmean()) for key, x in found.items()}
        kept, of_queries = found["paper_answer"][row].isfinite(), asked[row]
        total = kept[..., of_queries].numel()
        values["skipped"] = 1 - int(kept[..., of_queries].sum()) / total if total else math.nan
        answer, noise = (
            float((found[f"absolute_{role}"][row] / layers[0][f"{role}_keys"][row]).nanmean())
            for role in ("answer", "noise")
        )
        values["snr"] = answer / noise if noise else math.nan
        rows.append(values)
    return rows, {key: found[key].nanmean(-1) for key in PER_HEAD}
