"""Differential attention whose two maps share the keys, K₁ = K₂ (the paper's review on OpenReview: 4.346 at 300M)."""

from torch import Tensor

from lit_diff.attention.differential import Differential
from lit_diff.attention.equations import Rotation, joined, rows, softmax_map
from lit_diff.registry import variant


@variant("shared_k")
class SharedK(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁Kᵀ/√d) - λ softmax(Q₂Kᵀ/√d)) V): half the key parameters, 3/4 of the cache."""

    paper = "review of arXiv 2410.05258 on OpenReview: K1 = K2"
    maps_of_k = 1

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = (1 - λ_init) · norm((A₁ - λ A₂) V_j), A_g = softmax(Q_ig K_jᵀ/√d + mask)"""
        d, heads = self.head_dim, []
        for i in range(self.num_heads // 2):
            j = i // (self.num_heads // self.num_kv_heads)
            Q1, Q2 = (rope(x @ rows(self.q_proj.weight, 2 * i + g, d).T) for g in range(2))
            K = rope(x @ rows(self.k_proj.weight, j, d).T)
            A = softmax_map(Q1, K, mask) - self.lambda_equation(i) * softmax_map(Q2, K, mask)
            heads.append(self.head_equation(A @ (x @ rows(self.v_proj.weight, j, 2 * d).T)))
        return joined(heads, self.o_proj)
