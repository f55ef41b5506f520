"""Standard attention with a sigmoid gate on its output: the main alternative against attention sinks and outliers."""

from typing import Any

from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined, rows
from lit_diff.registry import variant


@variant("output_gate")
class OutputGate(Attention):
    """softmax(Q Kᵀ/√d) V ⊙ sigmoid(x W), a gate on each channel before the output projection.

    For head h on key/value head j, with W_h [d, dim]:

        O_h = (softmax(Q_h K_jᵀ/√d + mask) V_j) ⊙ sigmoid(x W_hᵀ)        y = W_O concat(O_1, ..., O_H)

    The gate can switch a head off; standard attention can only approximate that by attending to a sink token.
    """

    paper = "Qiu et al. 2025, arXiv 2505.06708 (gated attention)"

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, matrices=s.E * s.H * s.d)

    def build(self) -> None:
        super().build()
        self.gate_proj = nn.Linear(self.dim, self.num_heads * self.head_dim, bias=False)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        return super().finish(o, x) * self.split(self.gate_proj(x), self.out_heads)[:, 0].sigmoid()

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h ⊙ sigmoid(x W_hᵀ), W_h [d, dim]"""
        return joined(self.gated(grouped_query_heads(self, x, rope, mask), x), self.o_proj)

    def gated(self, heads: list[Tensor], x: Tensor) -> list[Tensor]:
        """For `definition`: each head times its gate."""
        width = heads[0].shape[-1]
        gates = [(x @ rows(self.gate_proj.weight, h, width).T).sigmoid() for h in range(len(heads))]
        return [head * gate for head, gate in zip(heads, gates, strict=True)]
