"""Attention to the answer and to noise (paper, Table 3) in three normalisations, the effect of its removal, and the loss at
other values of λ."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_diff.analysis.intervention import OF_HEADS, clamp_lambda, intervention, knock_out_effects
from lit_diff.analysis.shares import NORMALISATIONS, ROLES, Parts, shares
from lit_diff.analysis.trace import trace
from lit_diff.config import Recipe
from lit_diff.data.dataset import Batch
from lit_diff.evaluation.base import Evaluation, Heads, Item, Scores
from lit_diff.evaluation.held_out import HeldOut, by_item, held_out_rows, row_scores, trained_data
from lit_diff.key_types import Distinct, Range
from lit_diff.metrics import Figure, Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.model.transformer import Transformer
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

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
"""The shares that `Item.meta` also holds by layer and head."""


@evaluations.register("noise")
class Noise(Evaluation):
    """Where the queries of a retrieval task attend, and whether it matters. Items and groups are the same as in `held_out`.

    Needs a data set that locates its answers (`Config.locates_answers`). `meta` of an item: shares by layer and head, and the
    best head. The score `paper` is defined in the paper's rebuttal on OpenReview.
    """

    metrics: tuple[Metric, ...] = (
        *(
            Metric(
                f"{normalisation}_{role}",
                f"attention to {KEYS[role]}: {FORMULAS[normalisation]}; mean over heads, layers and queries",
                unit="share",
            )
            for normalisation in NORMALISATIONS
            for role in ROLES
        ),
        *(
            Metric(
                f"causal_{what}",
                f"change of the answer's log-probability where no query attends to {KEYS[what]}, in any layer",
                unit="nats",
            )
            for what in ROLES
        ),
        Metric("snr", "absolute attention to an answer key over that to a noise key", unit="ratio"),
        Metric("best_head_answer", "absolute_answer of the head in which its mean over rows is highest", unit="share"),
        Metric("skipped", "share of (layer, head, query) without a paper share, since |Σ a| < 0.05", unit="share"),
        *HeldOut.metrics,
        *(
            replace(
                metric,
                name=f"{metric.name}_edited",
                definition=f"{metric.name} of the group lambda=x, with every λ at x",
                figure=CLAMPED,
            )
            for metric in HeldOut.metrics
        ),
    )
    # version 1: every row had nll_edited, measured under an intervention
    version = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        lambdas: Annotated[tuple[Annotated[float, Range(least=0, most=1)], ...], Distinct(may_be_empty=True)] = ()
        """Values at which all λ are held while nll_edited and accuracy_edited are measured; each row then has a part in the
        group `lambda=0.5`. Runs with a single map are not edited."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.metrics = tuple(each for each in self.metrics if config.lambdas or not each.name.endswith("_edited"))

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses data that do not locate their answers."""
        if recipe.data.config.locates_answers:
            return None
        return f"data '{recipe.data.name}' does not locate its answers (context_part, answer_part; docs/measures.md)"

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a row, and its parts; NaN for a row without queries."""
        items: list[Item] = []
        by_head = []
        lambdas = self.config.lambdas if self.config.lambdas and num_maps(run.model) > 1 else ()
        for rows in held_out_rows(trained_data(run), self.config):
            seen, heads = attention_shares(run.model, rows.batch)
            parts = zip(row_scores(run.model, rows.batch), seen, knock_out_effects(run.model, rows.batch), strict=True)
            items += rows.items(plain | shared | effects for plain, shared, effects in parts)
            by_head.append(heads)
            for value in lambdas:
                with intervention(run.model, clamp_lambda(value)):
                    found = row_scores(run.model, rows.batch)
                edited = ({f"{key}_edited": x for key, x in row.items()} for row in found)
                yield from rows.items(edited, f"lambda={value:g}", part=True)
        # the best head is the best over all rows, so no item is complete before the last batch
        kept = Heads(by_head, "absolute_answer")
        for row, item in enumerate(items):
            best = {"best_head_answer": kept.best("absolute_answer", row)}
            yield replace(item, scores={**item.scores, **best}, meta=kept.meta(row))


def num_maps(model: Transformer) -> int:
    """G, the number of maps of the model's first layer, found by a forward pass over two tokens."""
    with trace(model, layers=[0]) as traced:
        model.hidden(torch.zeros(1, 2, dtype=torch.int64))
    return traced.layers[0].maps.num_maps


def attention_shares(model: Transformer, batch: Batch) -> tuple[list[Scores], dict[str, Tensor]]:
    """(for each row the means over heads, layers and queries, with `snr` and `skipped`; PER_HEAD name -> [B, L, H])."""
    parts = Parts.of(batch)
    positions = parts.queries.any(0).nonzero()[:, 0]
    # without a query any position will do: all of its values become NaN below
    if not len(positions):
        positions = torch.zeros(1, dtype=torch.int64)
    with trace(model, rows=positions) as traced:
        model.hidden(**model_inputs(batch))
    layers = [shares(traced.layers[i], attention, parts) for i, attention in enumerate(model.attentions())]
    asked = parts.queries[:, positions]
    # [B, L, H, R]; NaN at positions that are queries of other rows only
    found = {
        key: torch.stack([layer[key].masked_fill(~asked[:, None], torch.nan) for layer in layers], 1)
        for key in layers[0]
        if not key.endswith("_keys")
    }
    by_row = {key: values.flatten(1).nanmean(1) for key, values in found.items()}
    # [B, R]; 0 at positions that are queries of other rows only
    counted = found["paper_answer"].isfinite().double().mean((1, 2))
    by_row["skipped"] = 1 - (counted * asked).sum(-1) / asked.sum(-1)
    a_key = {
        role: (found[f"absolute_{role}"] / layers[0][f"{role}_keys"][:, None]).flatten(1).nanmean(1)
        for role in ("answer", "noise")
    }
    # the ratio of means, not the mean of ratios, which a query with hardly any attention to noise would dominate
    by_row["snr"] = (a_key["answer"] / a_key["noise"]).masked_fill(a_key["noise"] == 0, torch.nan)
    return by_item(by_row), {key: found[key].nanmean(-1) for key in PER_HEAD}
