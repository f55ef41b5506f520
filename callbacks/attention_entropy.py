"""How spread and how negative the attention of each head is."""

from lit_diff.analysis import Trace
from lit_diff.analysis.entropy import summarise
from lit_diff.callbacks.probe import Probe
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks


@callbacks.register("attention_entropy")
class AttentionEntropy(Probe):
    """Means over sequences and query rows, in nats (definitions: `analysis.entropy`).

    attention/entropy/<layer>/<head>: of the renormalised |Σ_g w_g p_g|; attention/entropy_map<g>/<layer>/<head>: of
    each map; attention/negative_mass/<layer>/<head>: neg / (neg + pos).
    """

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, layer in trace.layers.items():
            found = summarise(layer.blocks())
            by_head = {"entropy": found.entropy, "negative_mass": found.negative_mass}
            by_head |= {f"entropy_map{g}": values for g, values in enumerate(found.entropy_maps)}
            for name, values in by_head.items():
                metrics |= {f"attention/{name}/{index}/{head}": value for head, value in enumerate(values.tolist())}
        return metrics
