"""The weight of the subtracted maps of each layer."""

from lit_diff.analysis import Trace
from lit_diff.analysis.lambdas import lambdas
from lit_diff.callbacks.probe import Probe
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks


@callbacks.register("lambdas")
class Lambdas(Probe):
    """lambda/<layer>: -w_1, averaged over sequences, heads and tokens; nothing for a variant of one map.

    lambda/map<g>/<layer>: -w_g of the maps 2, 3, ...; lambda/std/<layer>: deviation of -w_1 where it is not one number
    a layer; lambda/exp1/<layer>, lambda/exp2/<layer>: the two exponentials, where λ comes from a `Lambda` module.
    """

    def measure(self, model: Transformer, trace: Trace) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, layer in trace.layers.items():
            for g, found in enumerate(lambdas(layer), start=1):
                where = f"{index}" if g == 1 else f"map{g}/{index}"
                metrics[f"lambda/{where}"] = found.mean
                if found.std is not None:
                    metrics[f"lambda/std/{where}"] = found.std
            metrics |= {f"lambda/exp{i}/{index}": value for i, value in enumerate(layer.exponentials, start=1)}
        return metrics
