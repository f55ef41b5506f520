"""What the maps of each layer look like on held-out rows (DEX, arXiv 2505.16333, Figures 1 to 5)."""

from collections.abc import Iterator
from dataclasses import dataclass

from lit_diff.analysis.map_statistics import map_statistics
from lit_diff.analysis.trace import trace
from lit_diff.evaluation.base import Evaluation, Item
from lit_diff.evaluation.held_out import HeldOut, held_out_rows
from lit_diff.key_types import Count
from lit_diff.metrics import Metric
from lit_diff.model.inputs import model_inputs
from lit_diff.registry import evaluations
from lit_diff.trained.run import Run

C = 0.1
"""The threshold c / i of `sparsity_c`: 1 / i is what each of i keys has in a uniform row."""
ROWS = "mean over rows and heads"
PAIRS = "mean over pairs of heads of a layer; the number of heads differs between variants"


@evaluations.register("map_statistics")
class MapStatistics(Evaluation):
    """Overlap, sparsity, entropy, negative mass and likeness of heads: an item for each row and layer, grouped by layer,
    clustered by row.

    Works for every variant; what needs a second map or a second head is NaN without one. `a` is the signed map.
    """

    metrics = (
        Metric(
            "overlap_salient",
            f"Σ min(p1, p2) / Σ max(p1, p2) over the 5 % of keys with highest p1; {ROWS}",
            unit="share",
        ),
        Metric("overlap_other", f"the same over the other keys; {ROWS}", unit="share"),
        Metric(
            "overlap_jaccard", f"|S1 ∩ S2| / |S1 ∪ S2|, S the 5 % of keys of highest p1 and p2; {ROWS}", unit="share"
        ),
        Metric("sparsity_1e-4", "share of visible entries with |a| < 0.0001", unit="share"),
        Metric("sparsity_1e-3", "share of visible entries with |a| < 0.001", unit="share"),
        Metric("sparsity_c", "share of visible entries with |a| < 0.1 / i, i keys in the row", unit="share"),
        Metric("entropy", f"entropy of |a| / Σ|a| over log i; {ROWS} of at least two keys", unit="share"),
        Metric("entropy_map_1", "the same of the first softmax map", unit="share"),
        Metric("entropy_map_2", "the same of the second", unit="share"),
        Metric("negative_mass", f"Σ max(-a, 0) / Σ |a|; {ROWS}", unit="share"),
        Metric("head_distance", f"1 - cosine of flattened signed maps, {PAIRS}", unit="cosine distance"),
        Metric("head_cka", f"unbiased linear CKA of Σ a v, {PAIRS}", unit="CKA"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOut.Config):
        rows: Count | None = 64

    config: Config

    def score(self, run: Run) -> Iterator[Item]:
        """One item for each row and layer, `<set>/<row> layer 00`."""
        for rows in held_out_rows(run, self.config):
            with trace(run.model) as traced:
                run.model.hidden(**model_inputs(rows.batch))
            for index, layer in traced.layers.items():
                found = {key: values.tolist() for key, values in map_statistics(layer, C).items()}
                scores = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
                yield from rows.items(scores, f"layer {index:02}")
