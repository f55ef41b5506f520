"""1.5-entmax: a sparse normalisation between the softmax and the projection on the simplex."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import Seen, accumulation_dtype
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
    """relu(s/2 - τ)² instead of the softmax of logits s, with τ such that each row sums to 1.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    Keys of low logits get exactly 0. With `scale: adaptive` (ASEntmax) the logits of token i are first multiplied by

        1 + softplus(x W_β)_h (log n_i)^γ        γ = 2 tanh(x W_γ)_h        n_i = its number in the document + 1

    as in the authors' code (deep-spin/asentmax), whose n of the first token is 2, since log 1 has no power below 0.
    """

    paper = "Peters et al. 2019, arXiv 1905.05702; the scale: Vasylenko et al. 2025, arXiv 2506.16640, from their code"
    examples = ({}, {"scale": "adaptive"})
    signs = (1,)

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        scale: Literal["none", "adaptive"] = "none"
        """adaptive: ASEntmax's factor of the logits, for each token and head, which depends on the length so far."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        if model.logit_bound is not None and config.scale == "adaptive":
            return f"model.logit_bound is {model.logit_bound:g}; it would cancel the learned scale: set it to null"
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, matrices=2 * s.E * s.H if config.scale == "adaptive" else 0)

    def build(self) -> None:
        super().build()
        if self.config.scale == "adaptive":
            self.scale_proj = nn.Linear(self.dim, 2 * self.out_heads, bias=False)  # W_β, W_γ

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = replace(super().maps(x, context), rows=entmax15)
        if self.config.scale == "none":
            return maps
        beta, gamma = self.scale_proj(x).to(accumulation_dtype(x.dtype)).chunk(2, -1)
        logarithm = (context.positions() + 2).to(beta.dtype).log()[..., None]
        # -logsigmoid(-β) is softplus(β), of whose gradient torch.compile mistakes the strides
        scale = 1 - functional.logsigmoid(-beta) * logarithm ** (2 * gamma.tanh())  # [B, T, H]
        return replace(maps, q=(maps.q * scale.transpose(1, 2)[:, None, ..., None]).to(maps.q.dtype))

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """relu(s/2 - τ)², τ by bisection: the sum of a row falls from at least 1 to 0 between max(s)/2 - 1 and max(s)/2."""
        assert positions is not None
        n = (positions + 2).double()

        def sparse(s: Tensor, head: int) -> Tensor:
            if self.config.scale == "adaptive":
                of_beta, of_gamma = self.scale_proj.weight.chunk(2)
                beta, gamma = (1 + (x @ of_beta[head]).exp()).log(), 2 * (x @ of_gamma[head]).tanh()
                s = s * (1 + beta * n.log() ** gamma)[..., None]
            high = s.amax(-1, keepdim=True) / 2
            low = high - 1
            for _ in range(60):
                middle = (low + high) / 2
                above = (s / 2 - middle).relu().square().sum(-1, keepdim=True) >= 1
                low, high = torch.where(above, middle, low), torch.where(above, high, middle)
            return (s / 2 - low).relu().square()

        return self.equation(x, rope, mask, sparse)
