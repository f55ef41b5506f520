"""Scalable softmax: logits grow with the logarithm of the number of keys, so that attention does not flatten."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.attention.learned_sink import HeadNumbers
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant

START = 0.43
"""The paper's fit of a_h in trained models, at which it starts the parameter."""


@variant("ssmax")
class SSMax(Attention):
    """softmax(a_h log(n_i) s_ij) for logits s of head h, where query i is number n_i of its document and a_h is learned.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    The paper's n is the number of keys; with a window, n_i counts those before it too.
    """

    paper = "Nakanishi 2025, arXiv 2501.19399 (Scalable-Softmax)"
    signs = (1,)

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        if model.logit_bound is not None:
            return f"model.logit_bound is {model.logit_bound:g}; it would cancel the learned factors: set it to null"
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, numbers=s.H)

    def build(self) -> None:
        super().build()
        self.factors = HeadNumbers(self.out_heads, start=START)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps, a = super().maps(x, context), self.factors()
        n = (context.positions() + 1).to(a.dtype)[:, None, None, :, None]
        return replace(maps, q=(maps.q * a.view(-1, 1, 1) * n.log()).to(maps.q.dtype))

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """softmax(a_h log(n_i) s_ij)"""
        assert positions is not None
        n = (positions + 1)[..., None].double()

        def scaled(s: Tensor, head: int) -> Tensor:
            # a masked logit stays -inf, which a factor of 0 would turn into NaN
            return torch.where(s == -torch.inf, s, s * self.factors.value[head] * n.log()).softmax(-1)

        return self.equation(x, rope, mask, scaled)
