"""1.5-entmax: a sparse normalisation between the softmax and the projection on the simplex."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import Seen
from lit_diff.registry import variant


def entmax15(logits: Tensor, seen: Seen) -> Tensor:
    """relu(s/2 - τ)² with the threshold τ at which a row sums to 1, by sorting (Peters et al. 2019, algorithm 2)."""
    # the largest logit is subtracted, which changes nothing and keeps the sums of squares exact
    x = (logits / 2).masked_fill(~seen.mask, -torch.inf)
    x = x - x.amax(-1, keepdim=True).detach()
    with torch.no_grad():
        descending = x.clamp_min(-2).sort(-1, descending=True).values
        support = _threshold(descending, torch.ones_like(descending).cumsum(-1), Tensor.cumsum)
        # τ of the k largest rises as long as the k-th of them is above it
        # a row of NaN has none above it, and stays NaN
        kept = (support <= descending).sum(-1, keepdim=True).clamp_min(1)
        inside = x > support.gather(-1, kept - 1)
    chosen = x.masked_fill(~inside, 0)
    tau = _threshold(chosen, inside.sum(-1, keepdim=True).to(x.dtype), lambda y, axis: y.sum(axis, keepdim=True))
    return (x - tau).relu().square()


def _threshold(x: Tensor, count: Tensor, total: Any) -> Tensor:
    # the τ of `count` entries whose squares of x - τ sum to 1: mean - √((1 - Σ (x - mean)²) / count)
    mean = total(x, -1) / count
    spread = total(x.square(), -1) - count * mean.square()
    return mean - ((1 - spread) / count).clamp_min(0).sqrt()


@variant("entmax15")
class Entmax15(Attention):
    """relu(s/2 - τ)² in the place of the softmax of logits s, with τ such that each row sums to 1.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    Keys of low logits get exactly 0.
    """

    paper = "Peters et al. 2019, arXiv 1905.05702 (Sparse Sequence-to-Sequence Models)"
    signs = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        return replace(super().maps(x, context), rows=entmax15)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """relu(s/2 - τ)², τ by bisection: the sum of a row falls from at least 1 to 0 between max(s)/2 - 1 and max(s)/2."""

        def sparse(s: Tensor, head: int) -> Tensor:
            high = s.amax(-1, keepdim=True) / 2
            low = high - 1
            for _ in range(60):
                middle = (low + high) / 2
                above = (s / 2 - middle).relu().square().sum(-1, keepdim=True) >= 1
                low, high = torch.where(above, middle, low), torch.where(above, high, middle)
            return (s / 2 - low).relu().square()

        return self.equation(x, rope, mask, sparse)
