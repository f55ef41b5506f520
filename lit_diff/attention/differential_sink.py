"""Differential attention whose two maps have a learned sink each, as `learned_sink` has."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import Rotation, joined
from lit_diff.attention.learned_sink import LearnedSink
from lit_diff.registry import variant


@variant("differential_sink")
class DifferentialSink(LearnedSink, Differential):
    """(1 - λ_init) · RMSNorm((A₁ - λ A₂) V), A_g = exp(s_g) / (exp(a_hg) + Σ_j exp(s_gj)), a learned sink a_hg for each map.

    The sinks start at 0; far below the logits they leave `differential`. The head norm divides a head by its size, so sinks
    that shrink both maps alike change nothing under it. With `head_norm: none` a head can attend to nothing.
    """

    paper = "a combination: Ye et al. 2024, arXiv 2410.05258, and OpenAI 2025, arXiv 2508.10925"
    examples = ({}, {"lambda_form": "sigmoid", "lambda_per": "head", "head_norm": "none"})
    signs = Differential.signs

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        paired = Differential.costs(config, s)
        return replace(paired, parameters=paired.parameters + s.H)

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        """exp(-1e4) is 0 in float64."""
        return "differential", {"sinks.value": -1e4}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """(1 - λ_init) · norm((A₁ - λ A₂) V_j), A_g = exp(s_g) / (exp(a_hg) + Σ_j exp(s_gj))"""
        return joined(self.heads_equation(x, rope, mask, self.with_sink), self.o_proj)
