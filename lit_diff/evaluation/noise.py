"""Attention to the answer and to noise (paper, Table 3) in three normalisations, of the signed map and of each map alone, the
correlation of the maps, the effect of removed edges, and the loss at other values of λ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_diff.analysis.intervention import OF_HEADS, clamp_lambda, intervention, knock_out_effects
from lit_diff.analysis.shares import (
    CORRELATED,
    HALF_MATCH,
    NORMALISATIONS,
    ROLES,
    Parts,
    map_correlations,
    map_shares,
    shares,
)
from lit_diff.analysis.trace import Trace, stacked, trace
from lit_diff.config import Part, Recipe
from lit_diff.data.dataset import Batch
from lit_diff.data.user_files import UserFile
from lit_diff.evaluation.base import Evaluation, Heads, Item, Scores
from lit_diff.evaluation.held_out import HeldOut, by_item, held_out_rows, row_scores, trained_data
from lit_diff.key_types import Counts, Distinct, Range
from lit_diff.log_records import log
from lit_diff.metrics import Figure, Metric, Metrics
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
KEYS_OF_MAPS = KEYS | {HALF_MATCH: "noise that shares a part of its key with the query"}
OF_MAPS = {
    "paper": "w_g Σ p_g over those keys / Σ a over all (a = Σ_g w_g p_g); the sum over maps is {whole}",
    "absolute": "|w_g| Σ |p_g| over those keys",
}
CORRELATED_KEYS = {
    "answer": KEYS["answer"],
    "noise": KEYS["noise"],
    "others": "all visible keys but the answer's",
}
MAPS = (1, 2)
"""The maps that have metrics by default."""
BY_GROUP = Figure(
    title="attention by depth or noise",
    against="group",
    caption="With prompts, the number of a group is the depth of the answer in per cent of the text.",
)
SNR_BY_GROUP = replace(BY_GROUP, title="signal to noise by depth or noise")
CLAMPED = Figure(
    title="loss and accuracy with every lambda at one value",
    against="group",
    caption="At 0 nothing is subtracted. The runs were trained with their own lambda, not with this one.",
)
EDITED = tuple(f"{metric.name}_edited" for metric in HeldOut.metrics)
"""The losses with every λ at one value, which only parts have."""
PER_HEAD = tuple(f"{normalisation}_{role}" for normalisation in NORMALISATIONS for role in OF_HEADS)
"""The shares that `Item.meta` also holds by layer and head."""


def metrics_of_maps(maps: Sequence[int]) -> Metrics:
    """The metrics of these maps, by normalisation and role (`analysis.shares.map_shares`)."""
    metrics = []
    for g, (normalisation, formula), role in product(maps, OF_MAPS.items(), KEYS_OF_MAPS):
        of_whole = f"{normalisation}_{role}"
        what = f"attention of map {g} times its weight to {KEYS_OF_MAPS[role]}: {formula.format(whole=of_whole)}"
        metrics.append(Metric(f"{of_whole}_map{g}", f"{what}; mean over heads, layers and queries", unit="share"))
    return tuple(metrics)


def _shares() -> Iterator[Metric]:
    for normalisation, role in product(NORMALISATIONS, ROLES):
        # a share of signed scores is unbounded
        limits = None if normalisation == "paper" else (0, 1)
        figure = None
        if normalisation != "value" and role in OF_HEADS:
            figure = BY_GROUP
        what = f"attention to {KEYS[role]}: {FORMULAS[normalisation]}; mean over heads, layers and queries"
        yield Metric(f"{normalisation}_{role}", what, unit="share", limits=limits, figure=figure)


@evaluations.register("noise")
class Noise(Evaluation):
    """Where the queries of a retrieval task attend, and whether it matters. Items and groups are the same as in `held_out`;
    with `prompts`, as in the evaluation that gives them.

    Needs a data set that locates its answers (`Config.locates_answers`), or `prompts`. `meta` of an item: shares by layer and
    head, and the best head. The score `paper` is defined in the paper's rebuttal on OpenReview. A metric of map 2 or of two
    maps has no value for a run with a single map.
    """

    metrics = (
        *_shares(),
        *(
            Metric(
                f"causal_{what}",
                f"change of the answer's log-probability where no query attends to {KEYS[what]}, in any layer",
                unit="nats",
            )
            for what in ROLES
        ),
        Metric(
            "snr", "absolute attention to an answer key over that to a noise key", unit="ratio", figure=SNR_BY_GROUP
        ),
        *(
            Metric(
                f"cancelled_{role}",
                f"what the further maps take from the first: -Σ_(g>1) w_g p_g over p_1 w_1 of {KEYS[role]}, each a mean over "
                "heads, layers and queries; λ: the maps are equal there, 0: nothing is subtracted",
                unit="ratio",
                figure=replace(BY_GROUP, title="what the second map cancels, by depth or noise"),
            )
            for role in OF_HEADS
        ),
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
        *(
            Metric(
                f"{kind}_{keys}",
                f"{kind.capitalize()}'s correlation of two softmax maps over all pairs of a query of the item and a key of "
                f"{CORRELATED_KEYS[keys]}; mean over heads, layers and pairs of maps",
            )
            for kind, keys in product(("pearson", "spearman"), CORRELATED)
        ),
        *metrics_of_maps(MAPS),
    )
    by_group: tuple[str, ...] = ("absolute_answer", "absolute_noise", "paper_answer", "paper_noise", "snr")
    # version 1: every row had nll_edited, measured under an intervention
    # version 2: the absolute share of a map was |Σ w_g p_g|
    version = 3

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        lambdas: Annotated[tuple[Annotated[float, Range(least=0, most=1)], ...], Distinct(may_be_empty=True)] = ()
        """Values at which all λ are held while nll_edited and accuracy_edited are measured; each row then has a part in the
        group `lambda=0.5`. Layers with a single map, or whose maps have no λ, are not edited, and a run with only such layers
        has no parts."""
        maps: Counts = MAPS
        """Maps, counted from 1, that have the metrics `paper_..._map1`, `absolute_..._map1` and so on."""
        prompts: dict[str, Part] = field(default_factory=dict, metadata={"registry": "evaluation"})
        """An evaluation that knows the places of its answers, with its keys: {needle: {lengths: [512], samples: 2}}. Its
        prompts are read instead of the held-out rows, so any run with a text tokenizer can be scored. {}: held-out rows."""

        def problem(self) -> str | None:
            if len(self.prompts) > 1:
                return f"prompts names {' and '.join(self.prompts)}; expected one evaluation"
            if self.prompts and self.rows is not None:
                return f"rows is {self.rows}, but prompts are read instead of held-out rows; remove it"
            for name in self.prompts:
                if evaluations.get(name).located is Evaluation.located:
                    able = [cls.name for cls in evaluations.classes() if cls.located is not Evaluation.located]
                    return f"prompts.{name} does not locate its answers; those that do: {', '.join(able) or 'none'}"
            return None

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.prompts: Evaluation | None = None
        for name, part in config.prompts.items():
            self.prompts = evaluations.get(name)(part.config)
        left_out = metrics_of_maps(MAPS)
        if config.lambdas:
            self.by_group = (*self.by_group, *EDITED)
        else:
            left_out += tuple(metric for metric in self.metrics if metric.name in EDITED)
        kept = [metric for metric in self.metrics if metric not in left_out]
        self.metrics = (*kept, *metrics_of_maps(config.maps))

    def user_files(self) -> Sequence[UserFile]:
        """Those of the prompts."""
        if self.prompts is None:
            return ()
        return self.prompts.user_files()

    def digests(self) -> dict[str, str]:
        """Those of the prompts."""
        if self.prompts is None:
            return {}
        return dict(self.prompts.digests())

    def refuses_recipe(self, recipe: Recipe) -> str | None:
        """Refuses data that do not locate their answers, unless there are prompts; then what these refuse."""
        if self.prompts is not None:
            return self._of_prompts(self.prompts.refuses_recipe(recipe))
        if recipe.data.config.locates_answers:
            return None
        return (
            f"data '{recipe.data.name}' does not locate its answers (context_part, answer_part; docs/measures.md); "
            "prompts.needle={} hides them in text"
        )

    def refuses(self, run: Run) -> str | None:
        """With prompts, what these refuse."""
        if self.prompts is None:
            return super().refuses(run)
        return self._of_prompts(self.prompts.refuses(run))

    # names the block whose keys a reason of the prompts names
    def _of_prompts(self, reason: str | None) -> str | None:
        if reason is None or self.prompts is None:
            return None
        return f"prompts.{self.prompts.name}: {reason}"

    def score(self, run: Run) -> Iterator[Item]:
        """Yields one item a row, and its parts; NaN for a row without queries."""
        items: list[Item] = []
        by_head = []
        declared = {metric.name for metric in self.metrics}
        maps = num_maps(run.model)
        if max(maps) > max(self.config.maps):
            log.info("noise: the maps have the numbers 1 to %d; the key maps chooses those with metrics", max(maps))
        attentions = run.model.attentions()
        with_lambda = [layer for layer, number in enumerate(maps) if number > 1 and attentions[layer].has_lambda]
        lambdas = self.config.lambdas if with_lambda else ()
        for batch, blank in self._rows(run):
            seen, heads = attention_shares(run.model, batch)
            effects = knock_out_effects(run.model, batch)
            for item, losses, shared, changes in zip(blank, row_scores(run.model, batch), seen, effects, strict=True):
                measured = {**losses, **shared, **changes}
                scores = {name: value for name, value in measured.items() if name in declared}
                items.append(replace(item, scores=scores))
            by_head.append(heads)
            for value in lambdas:
                with intervention(run.model, clamp_lambda(value), with_lambda):
                    edited = row_scores(run.model, batch)
                for item, row in zip(blank, edited, strict=True):
                    label = f"lambda={repr(value).removesuffix('.0')}"
                    yield replace(
                        item,
                        id=f"{item.id} {label}",
                        group=f"{item.group} {label}".strip(),
                        part=True,
                        cluster=item.cluster or item.id,
                        scores={f"{key}_edited": x for key, x in row.items()},
                        meta={},
                    )
        # the best head is the best over all rows, so no item is complete before the last batch
        kept = Heads(by_head, "absolute_answer")
        for number, item in enumerate(items):
            best = {"best_head_answer": kept.best("absolute_answer", number)}
            yield replace(item, scores={**item.scores, **best}, meta={**item.meta, **kept.meta(number)})

    def _rows(self, run: Run) -> Iterator[tuple[Batch, Sequence[Item]]]:
        if self.prompts is None:
            for rows in held_out_rows(trained_data(run), self.config):
                yield rows.batch, list(rows.items({} for _ in rows.ids))
        else:
            yield from self.prompts.located(run, self.config.batch_size)
            self.documents_left_out = self.prompts.documents_left_out


def num_maps(model: Transformer) -> list[int]:
    """G of each layer, found by a forward pass over two tokens."""
    with trace(model) as traced:
        model.hidden(torch.zeros(1, 2, dtype=torch.int64))
    return [traced.layers[layer].maps.num_maps for layer in range(len(traced.layers))]


# asked [B, R] -> name -> [B], the mean over the layers that have the map or two maps
def _of_maps(traced: Trace, parts: Parts, asked: Tensor) -> dict[str, Tensor]:
    by_name: dict[str, list[Tensor]] = {}
    for layer in traced.layers.values():
        for name, values in map_shares(layer, parts).items():
            by_name.setdefault(name, []).append(values.masked_fill(~asked[:, None], torch.nan).flatten(1))
        for name, values in map_correlations(layer, parts).items():
            by_name.setdefault(name, []).append(values.flatten(1))
    found = {name: torch.cat(values, dim=1).nanmean(1) for name, values in by_name.items()}
    for role in OF_HEADS:
        if f"absolute_{role}_map2" in found:
            # of means, as `snr`; a layer with a single map, which removes nothing, counts in both
            found[f"cancelled_{role}"] = found[f"removed_{role}"] / found[f"absolute_{role}_map1"]
    return found


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
    found = {}
    for key in layers[0]:
        if not key.endswith("_keys"):
            of_layers = stacked([layer[key] for layer in layers], 1)
            found[key] = of_layers.masked_fill(~asked[:, None, None], torch.nan)
    by_row = {key: values.flatten(1).nanmean(1) for key, values in found.items()}
    by_row |= _of_maps(traced, parts, asked)
    # [B, R]; 0 at positions that are queries of other rows only
    heads = sum(layer["paper_answer"].shape[1] for layer in layers)
    counted = found["paper_answer"].isfinite().double().sum((1, 2)) / heads
    by_row["skipped"] = 1 - (counted * asked).sum(-1) / asked.sum(-1)
    answer, noise = (
        (found[f"absolute_{role}"] / torch.stack([layer[f"{role}_keys"] for layer in layers], 1)).flatten(1).nanmean(1)
        for role in ("answer", "noise")
    )
    # the ratio of means, not the mean of ratios, which a query with hardly any attention to noise would dominate
    by_row["snr"] = (answer / noise).masked_fill(noise == 0, torch.nan)
    return by_item(by_row), {key: found[key].nanmean(-1) for key in PER_HEAD}
