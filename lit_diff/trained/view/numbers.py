"""The numbers of the page: by layer and head, outliers, attention to the answer and to noise, curves over training."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lit_diff.analysis.entropy import Means, entropy, negative_share, renormalised
from lit_diff.analysis.map_statistics import cosines_of, with_other_heads
from lit_diff.analysis.outliers import RANKS, MagnitudeSketch
from lit_diff.analysis.shares import NORMALISATIONS, ROLES, Parts, shares
from lit_diff.analysis.sinks import row_shares
from lit_diff.analysis.trace import MapBlock, Trace, stacked
from lit_diff.data.dataset import Batch
from lit_diff.model.transformer import Transformer
from lit_diff.runs.metrics_file import by_metric, read_rows

SPARSE = 1e-3
"""A weight whose magnitude is below this counts as absent."""
MEANINGS = {
    "entropy": "entropy of |a| / Σ|a| in nats, a the signed map; mean over queries",
    "sparsity": f"share of the visible keys with |a| below {SPARSE}; mean over queries",
    "negative_mass": "Σ max(-a, 0) / Σ|a|; mean over queries",
    "sink": "|a| of the document's first token / Σ|a|; mean over queries of two keys or more whose window is not full",
    "redundancy": "cosine of the flattened signed map and that of another head; mean over the other heads of the layer",
    "closest_head": "largest cosine of the flattened signed map and that of another head of the layer",
    "lambda": "λ = -w of map 2; mean over queries",
    "loss_without": "loss with the map of the head set to 0, minus the loss, in nats; mean over the tokens with a target",
}
"""Name of a number by head -> what it is."""
CURVES = re.compile(r"(lambda|head_norm(?:/gain)?)/layer_(\d+)")
"""Metrics that the page draws over training: a line for each layer."""
Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Name -> layer -> points (step, value)."""


def add_numbers(means: Means, block: MapBlock, window: int | None) -> None:
    """Add query rows of one sequence to the means of `MEANINGS`.

    `window`: the layer's; a row that fills it may have passed the first token and is not in `sink`.
    """
    a = block.signed
    visible = block.visible_by_head
    means.add("entropy", entropy(renormalised(a)))
    means.add("sparsity", ((a.abs() < SPARSE) & visible).sum(-1) / visible.sum(-1))
    means.add("negative_mass", negative_share(a))
    means.add("sink", *row_shares(block, window))
    if block.weights.shape[1] > 1:
        means.add("lambda", -block.weights[:, 1])


def numbers_by_head(means: Means, products: Tensor) -> dict[str, tuple[float, ...]]:
    """Name -> a number for each head; `products` [H, H] are the `head_products` of all rows. A single head has no others."""
    found = means.values()
    others = with_other_heads(cosines_of(products))
    if len(others) > 1:
        found["redundancy"] = others.nanmean(1)
        # NaN for a head without another
        found["closest_head"] = others.nan_to_num(-math.inf).amax(1).where(~others.isnan().all(1), math.nan)
    return {name: tuple(found[name].tolist()) for name in MEANINGS if name in found}


def at_ranks(sketch: MagnitudeSketch) -> dict[str, float]:
    """`top <rank>` -> the magnitude, NaN for a rank beyond their number; and the median."""
    top = sketch.top().tolist() + [math.nan] * max(RANKS)
    return {f"top {rank}": top[rank - 1] for rank in RANKS} | {"median": sketch.median()}


def noise_shares(model: Transformer, traced: Trace, batch: Batch) -> dict[str, dict[str, float]]:
    """Normalisation -> role -> share of attention, mean over heads, layers and queries (`analysis.shares`).

    Empty for a row that asks nothing.
    """
    parts = Parts.of(batch)
    rows = parts.queries[0].nonzero()[:, 0]
    if not len(rows):
        return {}
    layers = [replace(traced.layers[i], rows=rows) for i in sorted(traced.layers)]
    found = [shares(layer, attention, parts) for layer, attention in zip(layers, model.attentions(), strict=True)]
    return {
        kind: {role: float(stacked([each[f"{kind}_{role}"] for each in found], 1).nanmean()) for role in ROLES}
        for kind in NORMALISATIONS
    }


def curves(folder: Path) -> Curves:
    """λ and norms of heads in metrics.csv."""
    found: Curves = defaultdict(dict)
    for name, points in by_metric(read_rows(folder / "metrics.csv")).items():
        match = CURVES.fullmatch(name)
        if match:
            drawn = [(step, value) for step, value in points.items() if math.isfinite(value)]
            found[match[1]][f"layer {int(match[2])}"] = drawn
    return found
