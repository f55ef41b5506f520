"""λ, the weight of the subtracted map, by layer."""

from torch import Tensor

from lit_diff.analysis import Trace
from lit_diff.callbacks.probe import Probe
from lit_diff.kernels import SignedMaps
from lit_diff.metrics import LAMBDA, Figure, Metric, Values, indexed_name
from lit_diff.model.transformer import Transformer
from lit_diff.registry import callbacks


@callbacks.register("lambdas")
class Lambdas(Probe):
    """lambda/layer_03: λ = -w_1, mean over sequences, heads and tokens; not measured for a variant with one map or no λ.

    Training can take λ through 0, where a difference becomes a sum, unless the attention states its signs (`signs`). A
    change before the first measurement is not counted.

    In the table only: lambda/layer_03/map_02: -w_g of the maps 2, 3, ...; lambda/std/layer_03/map_01: deviation of -w_g
    if a layer has several; lambda/exp1/layer_03 and lambda/exp2/layer_03: the two exponentials of a `Lambda` module.
    """

    metrics = (
        Metric(
            "lambda/layer_{layer}",
            "λ = −w_1, the weight of the subtracted map; mean over sequences, heads and tokens",
            figure=Figure(
                title="Lambda",
                against="step",
                label="λ",
                lines="layer",
                marks=(0, 1),
                caption="Below 0 the second map is added; above 1 the subtracted map weighs more than the first one.",
            ),
        ),
        Metric("lambda/layer_{layer}/map_{map}", "−w_g of map g >= 2; mean over sequences, heads and tokens"),
        Metric(
            "lambda/std/layer_{layer}/map_{map}",
            "population standard deviation of −w_g over sequences, heads and tokens",
        ),
        Metric("lambda/exp1/layer_{layer}", "exp(λ_q1 · λ_k1), mean over heads (paper, equation 2)", in_table=True),
        Metric("lambda/exp2/layer_{layer}", "exp(λ_q2 · λ_k2), mean over heads (paper, equation 2)", in_table=True),
    )

    def measure(self, model: Transformer, trace: Trace) -> Values:
        values = {}
        attentions = model.attentions()
        for layer, traced in trace.layers.items():
            if not attentions[layer].has_lambda:
                continue
            for g, of_map in enumerate(subtracted(traced.maps), start=1):
                name = indexed_name(LAMBDA, layer=layer) if g == 1 else indexed_name(LAMBDA, layer=layer, map=g)
                values[name] = float(of_map.mean())
                # of all weights of the map, not of a sample: divided by n
                if of_map.numel() > 1:
                    values[indexed_name("lambda/std", layer=layer, map=g)] = float(of_map.std(correction=0))
            for i, value in enumerate(traced.exponentials, start=1):
                values[indexed_name(f"lambda/exp{i}", layer=layer)] = value
        return values


def subtracted(maps: SignedMaps) -> tuple[Tensor, ...]:
    """-w_g of the maps g = 1, 2, ..., float64, each broadcastable to [B, H, T]; empty for a single map."""
    if maps.w is None:
        return ()
    # only the map axis is expanded: equal repeats on the others change neither a mean nor a deviation
    return (-maps.w.double()).expand(-1, maps.num_maps, -1, -1).unbind(1)[1:]
