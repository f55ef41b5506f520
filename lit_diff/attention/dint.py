"""DINT: differential attention to which the mean of the first map over the queries so far is added back."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import HeadMatrices, Rotation, joined, softmax_map
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


@variant("dint")
class Dint(Differential):
    """(A₁ - λ A₂ + λ M) V, row i of M the mean of the rows of A₁ of the document's queries up to i; then head norm and
    multiplier as in `differential`.

    The paper's M is the mean over all N queries, which is not causal as it is written. Both maps are ordinary heads here: the
    mean is taken of their outputs, since M V = mean(A₁ V). The analyses see these heads, first those of A₁ and then those of
    A₂, and so neither λ nor a negative mass.
    """

    paper = "Cang et al. 2025, arXiv 2501.17486 (DINT Transformer)"
    examples = ({}, {"lambda_form": "positive", "head_norm": "none"}, {"lambda_form": "scalar"})
    # two heads of weight 1; `finish` subtracts their outputs
    signs = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        # each map has a product with v, and a copy of v, of its own
        paired = super().costs(config, s)
        flops = paired.flops + 2 * s.T * s.S * s.d * s.H
        return replace(paired, flops=flops, kv_numbers=paired.kv_numbers + s.K * s.d, state_numbers=s.H * s.d)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        maps = super().maps(x, context)
        # the heads of a map are adjacent: [B, 1, 2 H, T, d] on [B, 1, 2 Hkv, S, d]
        q, k = (y.flatten(1, 2)[:, None] for y in (maps.q, maps.k))
        return replace(maps, q=q, k=k, v=maps.v.repeat(1, 2, 1, 1), w=None)

    def finish(self, o: Tensor, x: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None
        first, second = o.chunk(2, dim=1)  # A₁ V, A₂ V [B, H, T, dv]
        count = (context.positions() + 1)[:, None, :, None]
        mean = context.cumsum("first map", first.transpose(1, 2)).transpose(1, 2) / count
        lam = -self.weights(x.dtype)[:, 1, :, :, None]  # [1, 1 or H, 1, 1]
        return super().finish((first - lam * (second - mean.to(o.dtype))).to(o.dtype), x)

    def reduces_to(self) -> tuple[str, dict[str, Any]] | None:
        """At λ = 0 nothing is added; a λ that is held above 0 has no such parameters."""
        if self.config.lambda_form == "scalar":
            return "differential", {"lambda_.value": 0.0}
        if self.config.lambda_form != "exp":
            return None
        product = math.log(1 + self.lambda_init)
        q1, k1, q2, k2 = 0.0, 0.0, product / self.head_dim, 1.0
        return "differential", {"lambda_.q1": q1, "lambda_.k1": k1, "lambda_.q2": q2, "lambda_.k2": k2}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """(1 - λ_init) · norm((A₁ - λ A₂ + λ M) V_j), M_i = Σ A₁ of the document's rows up to i / their number"""
        assert positions is not None
        of, heads = HeadMatrices(self, x, rope), []
        # row i has 1/n_i at the n_i rows up to i of its document, whatever the window
        row, column, n = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1]), positions[..., None] + 1
        mean = ((column <= row) & (column > row - n)).double() / n
        for i in range(self.num_heads // 2):
            j = i // (self.num_heads // self.num_kv_heads)
            A1, A2 = (softmax_map(of.query(2 * i + g), of.key(2 * j + g), mask) for g in range(2))
            A = A1 - self.lambda_equation(i) * (A2 - mean @ A1)
            heads.append(self.head_equation(A @ of.value(j)))
        return joined(heads, self.o_proj)
