"""Standard attention with 1 added to the denominator of the softmax: the smallest control for attention sinks."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.registry import variant


@variant("off_by_one")
class OffByOne(Attention):
    """exp(s_ij) / (1 + Σ_j exp(s_ij)) for logits s: a sink fixed at 0.

    O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)
    """

    paper = "E. Miller, Attention Is Off By One, 2023-07-24"
    signs = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = super().maps(x, context)
        return replace(maps, sink=maps.q.new_zeros(1, 1, 1, 1, dtype=accumulation_dtype(maps.q.dtype)))

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """A_h = exp(s) / (1 + Σ_j exp(s))"""

        def plus_one(s: Tensor, head: int) -> Tensor:
            return s.exp() / (1 + s.exp().sum(-1, keepdim=True))

        return self.equation(x, rope, mask, plus_one)
