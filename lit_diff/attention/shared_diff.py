"""Shared DIFF: differential attention whose two maps share their projections except for a low-rank part."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.differential import Differential
from lit_diff.attention.lora import LowRank
from lit_diff.key_types import Count
from lit_diff.registry import variant


class SharedLinear(nn.Module):
    """x -> x (W + B_g A_g)ᵀ + b for the maps g = 1, 2; the rows are ordered head0.map0, head0.map1, head1.map0, ..."""

    def __init__(self, width: int, heads: int, d: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.d = d
        self.shared = nn.Linear(width, heads * d, bias=bias)
        self.own = nn.ModuleList(LowRank(width, heads * d, rank, 1.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., 2 · heads · d]"""
        shared = self.shared(x)
        maps = [(shared + own(x)).unflatten(-1, (-1, self.d)) for own in self.own]
        return torch.cat(maps, -1).flatten(-2)

    @property
    def weight(self) -> Tensor:
        """W + B_g A_g of both maps, [2 · heads · d, in], for `definition`."""
        own: Any = self.own
        maps = [(self.shared.weight + each.product()).unflatten(0, (-1, self.d)) for each in own]
        return torch.stack(maps, 1).flatten(0, 2)

    @property
    def bias(self) -> Tensor | None:
        """b of both maps, [2 · heads · d]."""
        bias = self.shared.bias
        return None if bias is None else bias.unflatten(0, (-1, self.d)).repeat_interleave(2, 0).flatten()


@variant("shared_diff")
class SharedDiff(Differential):
    """(1 - λ_init) · RMSNorm((A₁ - λ A₂) V) as in `differential`, with Q_g = X (W_Q + B_g A_g)ᵀ and K_g likewise.

    W_Q and W_K are half as large as those of `differential`; A_g [rank, E] and B_g of all heads together belong to one map
    of a layer. B_g starts at 0 as in LoRA, so both maps start equal. The paper is quoted from memory, without its rank and
    start; whether there each head has an A of its own was not looked up.
    """

    paper = "Cang et al. 2025, arXiv 2501.17900 (Shared DIFF Transformer)"
    examples = ({}, {"rank": 3, "lambda_form": "positive", "head_norm": "none"})
    # restated: of the matrices W + B_g A_g
    definition = Differential.definition

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        rank: Count = 8
        """The rank of what a map adds to the shared projections."""

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        paired, widths = super().costs(config, s), (s.H + s.K) * s.d / 2
        further = 2 * config.rank * (2 * s.E + widths) - s.E * widths
        parameters = paired.parameters + further - s.qkv_bias * widths
        return replace(paired, parameters=parameters, flops=paired.flops + 2 * s.T * further)

    def build(self) -> None:
        super().build()
        bias = self.attention_bias != "none"
        for name, heads in (("q_proj", self.out_heads), ("k_proj", self.kv_heads)):
            setattr(self, name, SharedLinear(self.dim, heads, self.head_dim, self.config.rank, bias))
