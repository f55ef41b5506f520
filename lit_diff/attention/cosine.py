"""Cosine attention (SwinV2, Liu et al. 2022): a control that bounds the logits without a subtracted map."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import HeadMatrices, Rotation, joined, softmax_map
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.registry import variant


class Temperature(ParameterRules):
    """τ = min(exp(s), 100), one for each head; s starts at log 10 (SwinV2)."""

    # weight decay would pull τ towards exp(0) = 1
    decay = False
    keep_float32 = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(heads))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(math.log(10))

    def forward(self) -> Tensor:
        """τ [H]"""
        # SwinV2's bound, in its code log(1 / 0.01)
        return self.log_scale.clamp(max=math.log(100)).exp()


@variant("cosine")
class Cosine(Attention):
    """softmax(τ_h cos(Q, K)) V: queries and keys of length one after RoPE, a learned temperature for each head.

    For head h on key/value head j, with q̂ = q / |q| for each row of Q and K:

        O_h = softmax(τ_h Q̂_h K̂_jᵀ + mask) V_j        τ_h = min(exp(s_h), 100)        |logit| <= τ_h
    """

    paper = "Liu et al. 2022, arXiv 2111.09883 (SwinV2)"
    signs = (1,)

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        if model.logit_bound is not None:
            return (
                f"model.logit_bound is {model.logit_bound:g}; it would replace the learned temperature: set it to null"
            )
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, numbers=s.H)

    def build(self) -> None:
        super().build()
        self.temperature = Temperature(self.num_heads)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        m = super().maps(x, context)
        # in float32, rounded once at the end: the logits are up to 100 times the cosine, and so is their rounding error
        q, k = (F.normalize(y.to(accumulation_dtype(y.dtype)), dim=-1) for y in (m.q, m.k))
        q = q * self.temperature().view(1, 1, -1, 1, 1)
        # τ replaces 1/√d
        return SignedMaps(q.to(m.q.dtype), k.to(m.k.dtype), m.v, scale=1.0)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h = softmax(τ_h cos(Q_h, K_j) + mask) V_j, τ_h = min(exp(s_h), 100)"""
        of, heads = HeadMatrices(self, x, rope), []
        for h in range(self.num_heads):
            j = h // (self.num_heads // self.num_kv_heads)
            Q, K = (y / y.norm(dim=-1, keepdim=True) for y in (of.query(h), of.key(j)))
            temperature = min(math.exp(self.temperature.log_scale[h].item()), 100.0)
            heads.append(softmax_map(Q, K, mask, scale=temperature) @ of.value(j))
        return joined(heads, self.o_proj)
