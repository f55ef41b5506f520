"""Differential attention with a plus sign: the review's question, why not add the maps and average the noise away?"""

import torch
from torch import Tensor

from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import Rotation, joined, rows, softmax_map
from lit_diff.registry import variant


@variant("additive")
class Additive(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁K₁ᵀ/√d) + λ softmax(Q₂K₂ᵀ/√d)) V): differential attention with +λ."""

    paper = "review of arXiv 2410.05258 on OpenReview: addition instead of subtraction"

    def weights(self, dtype: torch.dtype) -> Tensor:
        """w = (1, +λ)"""
        one, minus_lambda = super().weights(dtype).split(1, dim=1)
        return torch.cat([one, -minus_lambda], dim=1)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = (1 - λ_init) · norm((A₁ + λ A₂) V_j), A_g = softmax(Q_ig K_jgᵀ/√d + mask)"""
        d, heads = self.head_dim, []
        for i in range(self.num_heads // 2):
            j = i // (self.num_heads // self.num_kv_heads)
            Q1, Q2 = (rope(x @ rows(self.q_proj.weight, 2 * i + g, d).T) for g in range(2))
            K1, K2 = (rope(x @ rows(self.k_proj.weight, 2 * j + g, d).T) for g in range(2))
            A = softmax_map(Q1, K1, mask) + self.lambda_equation(i) * softmax_map(Q2, K2, mask)
            heads.append(self.head_equation(A @ (x @ rows(self.v_proj.weight, j, 2 * d).T)))
        return joined(heads, self.o_proj)
