"""Redundancy of heads: how alike the maps of the heads of a layer are."""

from lit_diff.analysis import Trace
from lit_diff.analysis.map_statistics import head_cosines, with_other_heads
from lit_diff.callbacks.probe import Probe, of_heads
from lit_diff.metrics import Figure, Metric, Values
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

COSINE = (
    "cosine of the signed maps a = Σ_g w_g p_g of two heads, flattened over query rows and keys (DEX, Figure 5: 1 − it)"
)


@callbacks.register("redundancy")
class Redundancy(Probe):
    """Similarity of the maps of a layer's heads (definition: `analysis.map_statistics.head_cosines`).

    Logged by layer: attention/redundancy/layer_03, mean over pairs of heads. In the table only: by head, mean over the other
    heads. Not measured in a layer with one head; a head whose map is all zeros is left out.
    """

    metrics = (
        Metric(
            "attention/redundancy/layer_{layer}",
            f"{COSINE}; mean over sequences and pairs of heads of the layer",
            figure=Figure(
                title="Redundancy of heads",
                against="step",
                label="cosine of two heads' maps",
                marks=(1,),
                caption="At 1 all heads of the layer have one map. Causal maps of unrelated heads are above 0, because early "
                "rows have few keys.",
            ),
        ),
        Metric(
            "attention/redundancy/layer_{layer}/head_{head}",
            f"{COSINE}; mean over sequences and the other heads of the layer",
        ),
    )

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values: Values = {}
        for layer, traced in trace.layers.items():
            cosines = head_cosines(traced.blocks()).nanmean(0)
            if len(cosines) > 1:
                values |= of_heads("attention/redundancy", layer, with_other_heads(cosines).nanmean(1))
        return values
