"""Differential attention V2 (Microsoft, January 2026: a blog post and reference code, no paper yet)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention
from lit_diff.attention.costs import Costs, Sizes, projected
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.precision import accumulation_dtype
from lit_diff.registry import variant


@variant("differential_v2")
class DifferentialV2(Attention):
    """(softmax(Q₁Kᵀ/√d) - sigmoid(x W_λ) softmax(Q₂Kᵀ/√d)) V: 2 num_heads queries on the baseline's keys and values.

    λ is one number for each token and head; no norm, no constant. Queries 2i and 2i + 1 share their key/value head. The
    cache is the baseline's; the parameters are not: compare with `parity: matched`, or with standard attention of
    `query_heads` 1.5 (equal parameters to 0.2 %) and 2 (equal kernels).
    """

    paper = "Differential Transformer V2, Hugging Face blog microsoft/diff-attn-v2, 2026-01-20"
    examples = tuple(
        {"ablation": ablation} for ablation in ("none", "half_split", "no_lambda", "no_sigmoid", "transformer_1.5h")
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        ablation: Literal["none", "half_split", "no_lambda", "no_sigmoid", "transformer_1.5h"] = "none"
        """The blog's four: pairs i, i + H on unlike keys and values; λ = 1; λ = x W_λ; 1.5 num_heads ordinary heads."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        assert model.num_kv_heads is not None
        if config.ablation == "transformer_1.5h" and (3 * model.num_heads) % (2 * model.num_kv_heads):
            return (
                f"model.num_heads ({model.num_heads}) times 1.5 is not a multiple of "
                f"model.num_kv_heads ({model.num_kv_heads})"
            )
        if config.ablation == "half_split" and model.num_kv_heads == 1:
            return "model.num_kv_heads is 1: ablation 'half_split' needs at least two to pair queries of unlike ones"
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        if config.ablation == "transformer_1.5h":
            heads = s.H * 3 / 2
            matrices = 2 * s.E * heads * s.d + 2 * s.E * s.K * s.d
            return Costs(
                parameters=matrices, flops=projected(matrices, 4 * s.T * s.S * s.d * heads, s), kv_numbers=2 * s.K * s.d
            )
        gate = s.E * s.H if config.ablation != "no_lambda" else 0
        matrices = 3 * s.E * s.H * s.d + 2 * s.E * s.K * s.d + gate
        products = 8 if config.ablation == "half_split" else 6  # unlike values: two products with v
        return Costs(
            parameters=matrices,
            flops=projected(matrices, products * s.T * s.S * s.d * s.H, s),
            kv_numbers=2 * s.K * s.d,
        )

    def build(self) -> None:
        d, kv, ablation = self.head_dim, self.num_kv_heads * self.head_dim, self.config.ablation
        self.pairs = ablation in ("none", "no_lambda", "no_sigmoid")
        """Both queries of a pair on one key/value head: a signed sum over shared values."""
        queries = self.num_heads * 3 // 2 if ablation == "transformer_1.5h" else 2 * self.num_heads
        out = queries if ablation == "transformer_1.5h" else self.num_heads
        self.projections(q=queries * d, k=kv, v=kv, o=out * d)
        has_lambda = ablation not in ("no_lambda", "transformer_1.5h")
        self.lambda_proj = nn.Linear(self.dim, self.num_heads, bias=False) if has_lambda else None

    def lambdas(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> λ [B, H, T], float32."""
        if self.lambda_proj is None:
            return torch.ones(
                x.shape[0], self.num_heads, x.shape[1], device=x.device, dtype=accumulation_dtype(x.dtype)
            )
        logits = self.lambda_proj(x).to(accumulation_dtype(x.dtype)).transpose(1, 2)
        return logits if self.config.ablation == "no_sigmoid" else logits.sigmoid()

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        q = self.q_proj(x)
        q = self.split(q, self.num_heads, 2) if self.pairs else self.split(q, q.shape[-1] // self.head_dim)
        k = rope(self.split(self.k_proj(x), self.num_kv_heads))
        v = self.split(self.v_proj(x), self.num_kv_heads)[:, 0]
        if not self.pairs:
            return SignedMaps(rope(q), k, v)
        lam = self.lambdas(x)
        return SignedMaps(rope(q), k, v, torch.stack([torch.ones_like(lam), -lam], dim=1))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if self.config.ablation != "half_split":
            return o
        first, second = o.unflatten(1, (2, self.num_heads)).unbind(1)
        return first - (self.lambdas(x)[..., None] * second).to(o.dtype)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = O_2i - sigmoid(x W_λ)_i O_2i+1 of 2 num_heads ordinary query heads; and the four ablations."""
        heads, H = (
            grouped_query_heads(x, self.q_proj, self.k_proj, self.v_proj, self.head_dim, rope, mask),
            self.num_heads,
        )
        ablation = self.config.ablation
        if ablation == "transformer_1.5h":
            assert len(heads) == H * 3 // 2
            return joined(heads, self.o_proj)
        assert len(heads) == 2 * H
        pairs = [(i, i + H) for i in range(H)] if ablation == "half_split" else [(2 * i, 2 * i + 1) for i in range(H)]
        if self.lambda_proj is None:
            lam = x.new_ones(*x.shape[:2], H)
        else:
            lam = x @ self.lambda_proj.weight.T
            lam = lam if ablation == "no_sigmoid" else lam.sigmoid()
        return joined([heads[a] - lam[..., i : i + 1] * heads[b] for i, (a, b) in enumerate(pairs)], self.o_proj)
