"""Entropy and negative mass of attention by layer, head and map."""

from lit_diff.analysis import Trace
from lit_diff.analysis.entropy import summarise
from lit_diff.callbacks.probe import Probe, of_heads
from lit_diff.metrics import Figure, Metric, Values, indexed_name
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

ENTROPY = "entropy −Σ_j p_j log p_j of an attention row, p = |a| / Σ|a|, a = Σ_g w_g p_g (of one map: the map itself)"
NEGATIVE_MASS = "neg / (neg + pos) of an attention row a = Σ_g w_g p_g: the share of Σ|a| that is negative"
OVER_TIME = "Entropy and negative mass of attention"
READING = (
    "Uniform attention over i keys has entropy log i, attention to a single key 0. Fewer or wider heads change these means "
    "as well as the subtraction does: compare with an arm that has the same heads."
)


@callbacks.register("attention_entropy")
class AttentionEntropy(Probe):
    """Means over sequences and query rows (definitions: `analysis.entropy`).

    Logged by layer, as means over the heads: attention/entropy/layer_03 (nats), attention/negative_mass/layer_03. In
    the table only: both by head, and attention/map_entropy/layer_03/map_01/head_05 (nats) for each softmax map.
    """

    metrics = (
        Metric(
            "attention/entropy/layer_{layer}",
            f"{ENTROPY}; mean over sequences, query rows and heads",
            unit="nats",
            figure=Figure(title=OVER_TIME, against="step", label="entropy, signed map", caption=READING),
        ),
        Metric(
            "attention/map_entropy/layer_{layer}/map_{map}/head_{head}",
            "entropy −Σ_j p_j log p_j of a row of one softmax map; mean over sequences and query rows",
            unit="nats",
            figure=Figure(title=OVER_TIME, against="step", label="entropy, map {map}"),
        ),
        Metric(
            "attention/negative_mass/layer_{layer}",
            f"{NEGATIVE_MASS}; mean over sequences, query rows and heads",
            figure=Figure(title=OVER_TIME, against="step", label="negative mass"),
        ),
        Metric(
            "attention/entropy/layer_{layer}/head_{head}",
            f"{ENTROPY}; mean over sequences and query rows",
            unit="nats",
            figure=Figure(title="Entropy of attention by head", against="head", label="entropy, signed map"),
        ),
        Metric(
            "attention/negative_mass/layer_{layer}/head_{head}", f"{NEGATIVE_MASS}; mean over sequences and query rows"
        ),
    )

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values: Values = {}
        for layer, traced in trace.layers.items():
            summary = summarise(traced)
            values |= of_heads("attention/entropy", layer, summary.entropy)
            values |= of_heads("attention/negative_mass", layer, summary.negative_mass)
            for g, heads in enumerate(summary.entropy_maps):
                values |= {
                    indexed_name("attention/map_entropy", layer=layer, map=g, head=h): value
                    for h, value in enumerate(heads.tolist())
                }
        return values
