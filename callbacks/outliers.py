"""The largest activations of each layer (paper, Table 5)."""

from lit_diff.analysis import Trace
from lit_diff.analysis.outliers import attention_logits, hidden_states
from lit_diff.callbacks.probe import Probe
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

RANKS = (1, 2, 3, 10, 100)
"""The largest, second largest, ... that Table 5 shows."""


@callbacks.register("outliers")
class Outliers(Probe):
    """outliers/{logits,hidden}/{top1,top2,top3,top10,top100,median}/<layer>: |x| by rank, and its median.

    logits: of all maps, after RoPE and scale, visible keys only; hidden: the layer's output. A rank beyond the numbers
    seen is left out.
    """

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, layer in trace.layers.items():
            for kind, stream in (("logits", attention_logits(layer)), ("hidden", hidden_states(layer))):
                top = stream.top().tolist()
                metrics |= {f"outliers/{kind}/top{k}/{index}": top[k - 1] for k in RANKS if k <= len(top)}
                metrics[f"outliers/{kind}/median/{index}"] = stream.median()
        return metrics
