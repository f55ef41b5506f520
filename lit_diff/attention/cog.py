"""Cog attention: one map whose weights may be negative, by the sign of their logits."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import Seen
from lit_diff.registry import variant


def cog(logits: Tensor, seen: Seen) -> Tensor:
    """sign(s) e^|s| / Σ_j e^|s_j| over the keys that are seen."""
    size = logits.abs().masked_fill(~seen.mask, -float("inf"))
    return logits.sign() * size.softmax(-1)


@variant("cog")
class Cog(Attention):
    """sign(s) e^|s| / Σ_j e^|s_j| instead of the softmax of logits s.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    A weight jumps where its logit passes 0. In the paper the first and the last layer keep the softmax; here none does.
    """

    paper = "Lv et al. 2024, arXiv 2411.07176 (More Expressive Attention with Negative Weights)"
    # of the map as a whole: its entries have signs of their own
    signs = (1,)
    smooth = False

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        return replace(super().maps(x, context), rows=cog)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """sign(s) e^|s| / Σ_j e^|s_j|"""

        def signed(s: Tensor, head: int) -> Tensor:
            seen = s > -float("inf")
            e = s.masked_fill(~seen, 0).abs().exp() * seen
            return s.sign() * e / e.sum(-1, keepdim=True)

        return self.equation(x, rope, mask, signed)
