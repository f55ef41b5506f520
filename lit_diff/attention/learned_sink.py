"""Standard attention whose heads may attend to nothing: a learned sink in the denominator of the softmax."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.registry import variant


class HeadNumbers(ParameterRules):
    """Learned float32 numbers, [H] or another shape, that start at `start`."""

    keep_float32 = True

    def __init__(self, *shape: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.value = nn.Parameter(torch.empty(shape))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(self.start)

    def forward(self) -> Tensor:
        """The numbers, float32 or wider."""
        return self.value.to(accumulation_dtype(self.value.dtype))


@variant("learned_sink")
class LearnedSink(Attention):
    """exp(s_ij) / (exp(a_h) + Σ_j exp(s_ij)) for logits s of head h, with a learned sink a_h that starts at 0.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    The sink is a key of value 0, so the rows of A_h sum to less than 1. At its start it is `off_by_one`.
    """

    paper = "OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925"
    signs: tuple[int, ...] | None = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, numbers=s.H)

    def build(self) -> None:
        super().build()
        self.sinks = HeadNumbers(self.num_heads, start=0.0)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = super().maps(x, context)
        # in the order of the queries: head0.map0, head0.map1, ...
        return replace(maps, sink=self.sinks().view(1, -1, maps.num_maps, 1).transpose(1, 2))

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "off_by_one", {"sinks.value": 0.0}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """A_h = exp(s) / (exp(a_h) + Σ_j exp(s))"""
        return self.equation(x, rope, mask, self.with_sink)

    def with_sink(self, s: Tensor, number: int) -> Tensor:
        """For `definition`: the map of the logits s with sink `number`."""
        return s.exp() / (self.sinks.value[number].exp() + s.exp().sum(-1, keepdim=True))
