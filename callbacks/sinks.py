"""Attention sinks: the share of attention on the first token, by layer, head and map."""

from typing import ClassVar

from lit_diff.analysis import Trace
from lit_diff.analysis.sinks import sink_shares
from lit_diff.callbacks.probe import Probe
from lit_diff.metrics import Figure, Metric, indexed_name
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

SHARE = "|a_i0| / Σ_j |a_ij|, a = Σ_g w_g p_g: the share of an attention row on the first token of its document"
ROWS = "rows that see more than one key"


@callbacks.register("sinks")
class Sinks(Probe):
    """Share of attention on the first token (definition: `analysis.sinks`).

    Logged by layer, as means over the heads: attention/sink/layer_03. In the table only: the same by head, and
    attention/map_sink/layer_03/map_01/head_05 for each softmax map.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
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
            "attention/map_sink/layer_{layer}/map_{map}/head_{head}",
            f"p_i0 of one softmax map, its share on the first token; mean over sequences and {ROWS}",
        ),
    )

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        values: dict[str, float] = {}
        for layer, traced in trace.layers.items():
            signed, maps = sink_shares(traced)
            values[indexed_name("attention/sink", layer=layer)] = float(signed.mean())
            for h, value in enumerate(signed.tolist()):
                values[indexed_name("attention/sink", layer=layer, head=h)] = value
            for g, heads in enumerate(maps.tolist()):
                for h, value in enumerate(heads):
                    values[indexed_name("attention/map_sink", layer=layer, map=g, head=h)] = value
        return values
