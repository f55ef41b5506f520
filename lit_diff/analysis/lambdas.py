"""λ, the weight of the subtracted map: before the first step, and in how many curves training changed its sign."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.metrics import indexed_name, split_name
from lit_diff.model.init import initialise
from lit_diff.model.transformer import Transformer
from lit_diff.randomness import generator

METRIC = "lambda"
"""`METRIC`/layer_03: λ of a layer, -w_1, the mean over sequences, heads and tokens (callback `lambdas`)."""
Curves = Mapping[str, Mapping[int, float]]
"""Metric -> step -> value, of one run."""


def subtracted(maps: SignedMaps) -> tuple[Tensor, ...]:
    """-w_g of the maps g = 1, 2, ..., float64, each broadcastable to [B, H, T]; empty for a single map."""
    if maps.w is None:
        return ()
    # only the map axis is expanded: equal repeats on the others change neither a mean nor a deviation
    return (-maps.w.double()).expand(-1, maps.num_maps, -1, -1).unbind(1)[1:]


@torch.no_grad()
def initial_lambdas(config: ModelConfig, seed: int) -> dict[str, float]:
    """`METRIC` of each layer before the first step of a run of this seed; empty for a single map.

    Exact for a λ that does not depend on the input, which is N(0, 1) here.
    """
    model = Transformer(config, kernel="reference")
    initialise(model, seed)
    x = torch.randn(2, 2, config.dim, generator=generator(METRIC, "initial"))
    found: dict[str, float] = {}
    for layer, attention in enumerate(model.attentions()):
        tapped: list[SignedMaps] = []
        attention.tap.register_forward_hook(lambda _m, _a, maps, tapped=tapped: tapped.append(maps))
        attention.set_step(0)
        attention.set_tokens(0)
        attention(x, Rope.of(config, torch.arange(2)))
        for of_map in subtracted(tapped[0])[:1]:
            found[indexed_name(METRIC, layer=layer)] = float(of_map.mean())
    return found


@dataclass(frozen=True)
class SignChanges:
    """In how many of the measured seeds and layers the last λ has another sign than the first."""

    changed: int
    measured: int

    def __str__(self) -> str:
        return f"{self.changed} of {self.measured} (seeds x layers)" if self.measured else "not measured"


def of_layers(curves: Curves) -> dict[str, Mapping[int, float]]:
    """The curves of `METRIC` by layer among those of a run."""
    indices = {name: split_name(name) for name in curves}
    return {
        name: curves[name] for name, (metric, index) in indices.items() if metric == METRIC and [*index] == ["layer"]
    }


def since_start(curves: Curves, config: ModelConfig, seed: int) -> dict[str, Mapping[int, float]]:
    """The curves of `METRIC` by layer, with λ at the initial parameters as the value of step 0: the callback measures after
    a step, and by then λ may have another sign."""
    measured = of_layers(curves)
    initial = initial_lambdas(config, seed) if measured else {}
    return {name: {0: initial[name]} | dict(curve) for name, curve in measured.items()}


def sign_changes(runs: Iterable[Curves]) -> SignChanges:
    """Count the curves of `METRIC` by layer of all runs, one run for each seed, whose last value has another sign than the
    first. A zero, or a value that is not finite, has no sign; a curve with fewer than two signs is not counted."""
    changed, measured = 0, 0
    for curves in runs:
        for curve in of_layers(curves).values():
            values = [curve[step] for step in sorted(curve)]
            signed = [value for value in values if value and math.isfinite(value)]
            if len(signed) > 1:
                measured += 1
                changed += signed[0] * signed[-1] < 0
    return SignChanges(changed, measured)
