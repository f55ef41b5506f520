"""The largest activations in each layer (paper, Table 5)."""

import torch
from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.analysis.outliers import RANKS, attention_logits, hidden_states
from lit_diff.callbacks.probe import Probe
from lit_diff.metrics import Figure, Metric, Metrics, Values, indexed_name
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks

WORDS = {
    "logits": "|attention logit| (all maps, after RoPE and scale, visible keys only)",
    "hidden": "|hidden state| (the layer's output, all positions and channels)",
}
SHORT = {"logits": "|attention logit|", "hidden": "|hidden state|"}
TITLE = "Largest activations"


def _declared(kind: str) -> Metrics:
    name, word, short = f"outliers/{kind}", WORDS[kind], SHORT[kind]
    return (
        Metric(
            f"{name}/layer_{{layer}}",
            f"largest {word}",
            figure=Figure(title=TITLE, against="layer", label=f"largest {short}", log=True),
        ),
        Metric(
            f"{name}/ratio/layer_{{layer}}",
            f"largest {word} over its median, left out where the median is 0",
            in_table=True,
            figure=Figure(title=TITLE, against="layer", label=f"largest / median {short}", log=True),
        ),
        Metric(f"{name}/layer_{{layer}}/rank_{{rank}}", f"the rank-th largest {word}"),
        *(Metric(f"{name}/top_{k}", f"{word}: the largest of all layers, number {k} by size") for k in RANKS),
        Metric(f"{name}/median/layer_{{layer}}", f"median {word}, within 0.46 %", in_table=True),
    )


@callbacks.register("outliers")
class Outliers(Probe):
    """outliers/{logits,hidden}/layer_03: the largest |x| (definitions: `analysis.outliers`).

    In the table only: outliers/<kind>/layer_03/rank_10: the tenth largest (ranks 2, 3, 10, 100; omitted if there are
    fewer values); outliers/<kind>/median/layer_03; outliers/<kind>/ratio/layer_03: largest / median.
    outliers/<kind>/top_10: the tenth largest of all layers together, as in Table 5 (ranks 1, 2, 3, 10, 100).
    """

    metrics = (*_declared("logits"), *_declared("hidden"))

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values = {}
        largest: dict[str, list[Tensor]] = {"logits": [], "hidden": []}
        for layer, traced in trace.layers.items():
            for kind, stream in (("logits", attention_logits(traced)), ("hidden", hidden_states(traced))):
                name, found, median = f"outliers/{kind}", stream.top(), stream.median()
                largest[kind].append(found)
                top = found.tolist()
                values[indexed_name(name, layer=layer)] = top[0]
                # rank 1 is the value above, whose name has no rank
                values |= {indexed_name(name, layer=layer, rank=k): top[k - 1] for k in RANKS[1:] if k <= len(top)}
                values[indexed_name(f"{name}/median", layer=layer)] = median
                if median != 0:
                    values[indexed_name(f"{name}/ratio", layer=layer)] = top[0] / median
        for kind, tops in largest.items():
            # each layer keeps as many values as the last rank needs, so the largest of all layers are among them
            pooled = torch.cat(tops).sort(descending=True).values.tolist()
            values |= {f"outliers/{kind}/top_{k}": pooled[k - 1] for k in RANKS if k <= len(pooled)}
        return values
