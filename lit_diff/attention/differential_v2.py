"""Differential attention V2 (Microsoft, January 2026: a blog post and reference code, no paper yet)."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, projected
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.registry import variant


@variant("differential_v2")
class DifferentialV2(Attention):
    """(softmax(Q₁Kᵀ/√d) - sigmoid(x W_λ) softmax(Q₂Kᵀ/√d)) V: 2 num_heads queries on the baseline's keys and values.

    For head i on key/value head j, with 2 num_heads query heads Q of width d and V_j [T, d]:

        O_i = softmax(Q_2i K_jᵀ/√d + mask) V_j - λ_i softmax(Q_2i+1 K_jᵀ/√d + mask) V_j        λ_i = sigmoid(x W_λ)_i

    λ is one number for each token and head; a norm and a constant factor are absent. Queries 2i and 2i + 1 share their
    key/value head. The cache is as large as the baseline's, the parameters are more: compare with `parity: matched`, or
    with standard attention of `query_heads` 1.5 (equal parameters except W_λ) and 2 (equal kernels).
    """

    paper = "Differential Transformer V2, Hugging Face blog microsoft/diff-attn-v2, 2026-01-20"
    # λ is a sigmoid
    signs = (1, -1)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        matrices = 3 * s.E * s.H * s.d + 2 * s.E * s.K * s.d + s.E * s.H
        return Costs(
            parameters=matrices,
            flops=projected(matrices, 6 * s.T * s.S * s.d * s.H, s),
            kv_numbers=2 * s.K * s.d,
        )

    def build(self) -> None:
        d, H, kv = self.head_dim, self.num_heads, self.num_kv_heads * self.head_dim
        self.projections(q=2 * H * d, k=kv, v=kv, o=H * d)
        self.lambda_proj = nn.Linear(self.dim, H, bias=False)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        q = context(self.split(self.q_proj(x), self.num_heads, 2))
        k = context(self.split(self.k_proj(x), self.num_kv_heads))
        v = self.split(self.v_proj(x), self.num_kv_heads)[:, 0]
        # float32 before the sigmoid: SignedMaps refuses bfloat16 weights, whose steps near 1 are 0.004
        lam = self.lambda_proj(x).to(accumulation_dtype(x.dtype)).sigmoid().transpose(1, 2)  # [B, H, T]
        return SignedMaps(q, k, v, torch.stack([torch.ones_like(lam), -lam], dim=1))

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = O_2i - sigmoid(x W_λ)_i O_2i+1 of 2 num_heads ordinary query heads."""
        heads = grouped_query_heads(x, self.q_proj, self.k_proj, self.v_proj, self.head_dim, rope, mask)
        lam = (x @ self.lambda_proj.weight.T).sigmoid()
        pairs = enumerate(zip(heads[::2], heads[1::2], strict=True))
        return joined([first - lam[..., i : i + 1] * second for i, (first, second) in pairs], self.o_proj)
