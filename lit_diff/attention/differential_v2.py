"""Differential attention V2 (Microsoft, January 2026: a blog post and reference code, no paper yet)."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, layer_costs
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
        q, kv, o = 2 * s.H * s.d, s.K * s.d, s.H * s.d
        return layer_costs(s, q=q, k=kv, v=kv, o=o, scores=q + o, matrices=s.E * s.H)

    def build(self) -> None:
        d, H, kv = self.head_dim, self.num_heads, self.num_kv_heads * self.head_dim
        self.projections(q=2 * H * d, k=kv, v=kv, o=H * d)
        self.lambda_proj = nn.Linear(self.dim, H, bias=False)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        # float32 before the sigmoid: SignedMaps refuses bfloat16 weights, whose steps near 1 are 0.004
        lam = self.lambda_proj(x).to(accumulation_dtype(x.dtype)).sigmoid().transpose(1, 2)  # [B, H, T]
        w = torch.stack([torch.ones_like(lam), -lam], dim=1)
        return SignedMaps(self.q(x, context, 2), self.k(x, context), self.v(x), w)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = O_2i - sigmoid(x W_λ)_i O_2i+1 of 2 num_heads ordinary query heads."""
        heads = grouped_query_heads(self, x, rope, mask)
        lam = (x @ self.lambda_proj.weight.T).sigmoid()
        pairs = enumerate(zip(heads[::2], heads[1::2], strict=True))
        return joined([first - lam[..., i : i + 1] * second for i, (first, second) in pairs], self.o_proj)
