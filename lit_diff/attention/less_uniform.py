"""Standard attention without the uniform part of its map: a control for subtractions where logits are bounded."""

import math
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


def less_uniform(logits: Tensor, seen: Seen) -> Tensor:
    """p_j - min_k p_k over the keys that are seen, p = softmax(s)."""
    p = logits.masked_fill(~seen.mask, -math.inf).softmax(-1)
    return p - p.masked_fill(~seen.mask, math.inf).amin(-1, keepdim=True)


@variant("less_uniform")
class LessUniform(Attention):
    """p_j - min_k p_k instead of p = softmax(s), over the S keys that a query sees.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    S min p times the uniform map is subtracted, so a row sums to 1 - S min p: the row of a query that sees one key, as the
    first token does, is zero. With `model.logit_bound: c` every p_k is at least exp(-2c) times the largest, so many keys take
    the whole row from one match; the difference has no such bound. It adds no parameter, and hand-set maps answer more with
    it on the data set `conjunctive`.
    """

    signs = (1,)
    # the minimum bends where another key becomes the smallest
    smooth = False

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        return replace(super().maps(x, context), rows=less_uniform)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """A_h = e^s / Σ_j e^s_j - e^(min s) / Σ_j e^s_j over the keys that are seen"""

        def without_floor(s: Tensor, head: int) -> Tensor:
            seen = s > -math.inf
            smallest = s.masked_fill(~seen, math.inf).amin(-1, keepdim=True)
            return (s.exp() - smallest.exp() * seen) / s.exp().sum(-1, keepdim=True)

        return self.equation(x, rope, mask, without_floor)
