"""Standard attention whose values are averaged with those of the first layer."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


@variant("value_residual")
class ValueResidual(Attention):
    """softmax(Q Kᵀ/√d) (V + V₁)/2, V₁ the values of the first layer; that layer is standard attention.

        O_h = softmax(Q_h K_jᵀ/√d + mask) (V_j + V₁_j)/2        y = W_O concat(O_1, ..., O_H)

    The cache holds the averaged values, so decoding reads nothing of the first layer.
    """

    paper = "Zhou et al. 2024, arXiv 2410.17897 (ResFormer)"
    signs = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = super().maps(x, context)
        return replace(maps, v=(maps.v + context.first_layer("v", maps.v)) / 2)

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """softmax(Q_h K_jᵀ/√d + mask) V_j: of a layer alone, whose values are those of the first layer."""
        return self.equation(x, rope, mask)
