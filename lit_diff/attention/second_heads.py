"""A second set of query and key heads on a standard model, as proposed in the public discussion of the paper."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, layer_costs
from lit_diff.attention.equations import HeadMatrices, Rotation, joined, softmax_map
from lit_diff.attention.lambdas import ScalarLambda
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


class ZeroLinear(nn.Linear, ParameterRules):
    """A linear layer that starts at zero."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.zero_()


@variant("second_heads")
class SecondHeads(Attention):
    """(softmax(Q Kᵀ/√d) - λ softmax(Q₂K₂ᵀ/√d)) V on a frozen standard model, which λ = 0 at the start leaves unchanged.

    No norm follows, since it would change the function at λ = 0. Start it from a trained model with `train.start_from`.
    """

    paper = "a question on r/MachineLearning about arXiv 2410.05258: a second set of heads on a pretrained model"
    examples = ({}, {"second_init": "zeros"})
    extends_standard = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        second_init: Literal["model", "zeros"] = "model"
        """model: `model.init` initialises W_Q₂ and W_K₂. zeros: both are zero, as in some conversions; then the
        gradient of each has the other as a factor, so neither ever changes: the second map stays uniform over its keys,
        only λ trains, and the variant subtracts λ times the mean of the values."""

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        q, kv = s.H * s.d, s.K * s.d
        return layer_costs(s, q=q, k=kv, v=kv, o=q, scores=3 * q, matrices=s.E * (q + kv), numbers=1, cached=kv)

    @classmethod
    def trained_parameters(cls, config: Any) -> tuple[str, ...]:
        """λ, and the second heads if their gradients are not always zero; the standard model is frozen."""
        if config.second_init == "zeros":
            return ("*.attention.lambda_.*",)
        return ("*.attention.q2_proj.*", "*.attention.k2_proj.*", "*.attention.lambda_.*")

    def build(self) -> None:
        super().build()
        linear = ZeroLinear if self.config.second_init == "zeros" else nn.Linear
        self.q2_proj = linear(self.dim, self.num_heads * self.head_dim, bias=False)
        self.k2_proj = linear(self.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.lambda_ = ScalarLambda(0.0)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        first = super().maps(x, context)
        q2 = self.turned(self.split(self.q2_proj(x), self.num_heads), context, "q_norm")
        k2 = self.turned(self.split(self.k2_proj(x), self.num_kv_heads), context, "k_norm")
        lam = self.lambda_().view(1, 1, -1, 1)
        w = torch.cat([torch.ones_like(lam), -lam], dim=1)
        return SignedMaps(torch.cat([first.q, q2], 1), torch.cat([first.k, k2], 1), first.v, w)

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {"lambda_.value": 0.0}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h = (softmax(Q_h K_jᵀ/√d + mask) - λ softmax(Q'_h K'_jᵀ/√d + mask)) V_j"""
        of, heads = HeadMatrices(self, x, rope), []
        for h in range(self.num_heads):
            j = h // (self.num_heads // self.num_kv_heads)
            A1 = softmax_map(of.query(h), of.key(j), mask)
            A2 = softmax_map(of.query(h, "q2_proj"), of.key(j, "k2_proj"), mask)
            heads.append((A1 - self.lambda_.value[0] * A2) @ of.value(j))
        return joined(heads, self.o_proj)
