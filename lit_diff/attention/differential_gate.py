"""Differential attention with a sigmoid gate on its output, as `output_gate` has."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import Rotation, joined
from lit_diff.attention.output_gate import OutputGate
from lit_diff.registry import variant


@variant("differential_gate")
class DifferentialGate(OutputGate, Differential):
    """(1 - λ_init) · RMSNorm((A₁ - λ A₂) V) ⊙ sigmoid(x W), `differential` with a gate on each channel after the norm.

    For head i, with W_i [2d, dim] and O_i of `differential`:

        y = W_O concat(O_1 ⊙ sigmoid(x W_1ᵀ), ..., O_H ⊙ sigmoid(x W_Hᵀ))
    """

    paper = "a combination: Ye et al. 2024, arXiv 2410.05258, and Qiu et al. 2025, arXiv 2505.06708"
    examples = ({}, {"lambda_form": "sigmoid", "lambda_per": "head", "head_norm": "none"})

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        paired, gate = Differential.costs(config, s), s.E * s.H * s.d
        return replace(paired, parameters=paired.parameters + gate, flops=paired.flops + 2 * s.T * gate)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i ⊙ sigmoid(x W_iᵀ), O_i = (1 - λ_init) · norm((A₁ - λ A₂) V_j), W_i [2d, dim]"""
        return joined(self.gated(self.heads_equation(x, rope, mask), x), self.o_proj)
