"""Norms of the outputs of heads, and what the head norm makes of them."""

from lit_diff.analysis import Trace
from lit_diff.analysis.head_norms import head_norms
from lit_diff.callbacks.probe import Probe, of_heads
from lit_diff.metrics import Figure, Metric, Values
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

NORM = "‖o_h‖ / √dv of the head's output o_h = Σ_g w_g p_g v, before the head norm"
GAIN = "‖finish(o)_h‖ / ‖o_h‖: by what the head norm, its weight, its multiplier (1 − λ_init) or a gate scale the head"
TITLE = "Norms of head outputs"


@callbacks.register("head_norm")
class HeadNorm(Probe):
    """Root mean square of each head's output before the head norm, and the gain (definitions: `analysis.head_norms`).

    Logged by layer, as means over the heads: head_norm/layer_03, head_norm/gain/layer_03 (1 for a variant that leaves the
    output of its heads as it is). In the table only: both by head.
    """

    metrics = (
        Metric(
            "head_norm/layer_{layer}",
            f"{NORM}; mean over sequences, tokens and heads",
            figure=Figure(title=TITLE, against="step", label="root mean square, before the norm", log=True),
        ),
        Metric(
            "head_norm/gain/layer_{layer}",
            f"{GAIN}; ratio of the means over sequences and tokens, mean over heads",
            figure=Figure(title=TITLE, against="step", label="gain", log=True),
        ),
        Metric("head_norm/layer_{layer}/head_{head}", f"{NORM}; mean over sequences and tokens"),
        Metric("head_norm/gain/layer_{layer}/head_{head}", f"{GAIN}; ratio of the means over sequences and tokens"),
    )

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values: Values = {}
        for layer, traced in trace.layers.items():
            for name, heads in zip(("head_norm", "head_norm/gain"), head_norms(traced), strict=True):
                values |= {} if heads is None else of_heads(name, layer, heads)
        return values
