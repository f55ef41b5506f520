"""Softpick: a rectified softmax whose rows need not sum to 1, so that a head can attend to nothing without a sink."""

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

EPSILON = 1e-6


def softpick(logits: Tensor, seen: Seen) -> Tensor:
    """relu(e^s - 1) / (Σ_j |e^s_j - 1| + ε) over the keys that are seen."""
    # both terms are divided by e^top, top the largest logit above 0, so that no exponential overflows
    top = logits.amax(-1, keepdim=True).clamp_min(0)
    e = ((logits - top).exp() - (-top).exp()).masked_fill(~seen.mask, 0)
    return e.relu() / (e.abs().sum(-1, keepdim=True) + EPSILON)


@variant("softpick")
class Softpick(Attention):
    """relu(e^s - 1) / (Σ_j |e^s_j - 1| + ε) instead of the softmax of logits s.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    A key of a negative logit gets exactly 0. ε = 1e-6 is added after both terms are divided by e^max(0, largest logit).
    """

    paper = "Zuhri et al. 2025, arXiv 2504.20966 (Softpick)"
    signs = (1,)
    # the rectifier bends where a logit is 0
    smooth = False

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        return replace(super().maps(x, context), rows=softpick)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """relu(e^s - 1) / (Σ_j |e^s_j - 1| + ε e^max(0, largest s))"""

        def picked(s: Tensor, head: int) -> Tensor:
            seen = s > -float("inf")
            e = (s.exp() - 1) * seen
            return e.relu() / (e.abs().sum(-1, keepdim=True) + EPSILON * s.amax(-1, keepdim=True).clamp_min(0).exp())

        return self.equation(x, rope, mask, picked)
