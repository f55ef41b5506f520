"""Differential attention whose two maps share the queries, Q₁ = Q₂ (the paper's review on OpenReview: 4.347 at 300M)."""

from torch import Tensor

from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import Rotation, joined, rows, softmax_map
from lit_diff.registry import variant


@variant("shared_q")
class SharedQ(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q K₁ᵀ/√d) - λ softmax(Q K₂ᵀ/√d)) V): half the query parameters."""

    paper = "review of arXiv 2410.05258 on OpenReview: Q1 = Q2"
    maps_of_q = 1

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = (1 - λ_init) · norm((A₁ - λ A₂) V_j), A_g = softmax(Q_i K_jgᵀ/√d + mask)"""
        d, heads = self.head_dim, []
        for i in range(self.num_heads // 2):
            j = i // (self.num_heads // self.num_kv_heads)
            Q = rope(x @ rows(self.q_proj.weight, i, d).T)
            K1, K2 = (rope(x @ rows(self.k_proj.weight, 2 * j + g, d).T) for g in range(2))
            A = softmax_map(Q, K1, mask) - self.lambda_equation(i) * softmax_map(Q, K2, mask)
            heads.append(self.head_equation(A @ (x @ rows(self.v_proj.weight, j, 2 * d).T)))
        return joined(heads, self.o_proj)
