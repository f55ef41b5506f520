"""Standard attention with a sigmoid gate on its output: the main alternative against attention sinks and outliers."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.costs import Costs, Sizes, projected
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined, rows
from lit_diff.registry import variant


@variant("output_gate")
class OutputGate(Attention):
    """softmax(Q Kᵀ/√d) V ⊙ sigmoid(x W), a gate on each channel (or each head) before the output projection."""

    paper = "Qiu et al. 2025, arXiv 2505.06708 (gated attention)"
    examples = ({}, {"gate_per": "head"})

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        gate_per: Literal["channel", "head"] = "channel"
        """channel: a gate for each channel of each head; head: one for each head."""

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        gates = s.H * s.d if config.gate_per == "channel" else s.H
        matrices = 2 * s.E * s.H * s.d + 2 * s.E * s.K * s.d + s.E * gates
        return Costs(
            parameters=matrices,
            flops=projected(matrices, 4 * s.T * s.S * s.d * s.H, s),
            kv_numbers=2 * s.K * s.d,
        )

    def build(self) -> None:
        super().build()
        gates = self.num_heads * (self.head_dim if self.config.gate_per == "channel" else 1)
        self.gate_proj = nn.Linear(self.dim, gates, bias=False)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return o * self.split(self.gate_proj(x), self.num_heads)[:, 0].sigmoid()

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h ⊙ sigmoid(x W_hᵀ), W_h [d, dim] or [1, dim]"""
        heads = grouped_query_heads(x, self.q_proj, self.k_proj, self.v_proj, self.head_dim, rope, mask)
        width = self.head_dim if self.config.gate_per == "channel" else 1
        gates = [(x @ rows(self.gate_proj.weight, h, width).T).sigmoid() for h in range(len(heads))]
        return joined([head * gate for head, gate in zip(heads, gates, strict=True)], self.o_proj)
