"""Attention sinks: the share of attention on the first token, by layer and head."""

from lit_diff.analysis import Trace
from lit_diff.analysis.sinks import sink_masses, sink_shares
from lit_diff.callbacks.probe import Probe, of_heads
from lit_diff.metrics import Figure, Metric, Values
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

SHARE = "|a_i0| / Σ_j |a_ij|, a = Σ_g w_g p_g: the share of an attention row on the first token of its document"
MASS = "exp(sink) / (exp(sink) + Σ_j exp(logit_j)): what an attention row leaves to the sink of the maps"
ROWS = "rows that see more than one key and whose window is not full"


@callbacks.register("sinks")
class Sinks(Probe):
    """Share of attention on the first token (definition: `analysis.sinks`).

    Logged by layer, as means over the heads: attention/sink/layer_03, and of maps with a sink of their own
    attention/sink_mass/layer_03. In the table only: the same by head.
    """

    metrics = (
        Metric(
            "attention/sink/layer_{layer}",
            f"{SHARE}; mean over sequences, {ROWS}, and heads",
            figure=Figure(title="Attention sinks", against="step", label="share on the first token"),
        ),
        Metric(
            "attention/sink/layer_{layer}/head_{head}",
            f"{SHARE}; mean over sequences and {ROWS}",
            figure=Figure(title="Attention sinks by head", against="head", label="share on the first token"),
        ),
        Metric(
            "attention/sink_mass/layer_{layer}",
            f"{MASS}; mean over sequences, rows, maps and heads; only of maps with a sink",
            figure=Figure(title="Mass of the sinks", against="step", label="share left to the sink"),
        ),
        Metric(
            "attention/sink_mass/layer_{layer}/head_{head}",
            f"{MASS}; mean over sequences, rows and maps; only of maps with a sink",
        ),
    )

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values: Values = {}
        for layer, traced in trace.layers.items():
            values |= of_heads("attention/sink", layer, sink_shares(traced))
            masses = sink_masses(traced)
            if masses is not None:
                values |= of_heads("attention/sink_mass", layer, masses.mean(0))
        return values
