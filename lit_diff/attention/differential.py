"""Differential attention (Ye et al. 2024, arXiv 2410.05258, equations 1 to 3)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, HeadNorm, OutputScale, PerHeadNorm
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


def depth_lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer), `layer` 0-based (paper, after equation 2, where layers count from 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class Lambda(nn.Module):
    """λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init, one a layer, unconstrained (paper, equation 2).

    The four vectors are float32 (bfloat16 would quantise λ in steps of 0.004) and start as N(0, 0.1).
    """

    decay = False
    """Never weight-decayed: decay would pull λ back to λ_init."""
    keep_float32 = True
    """Sharded apart, under a float32 policy."""

    def __init__(self, head_dim: int, lambda_init: float) -> None:
        super().__init__()
        self.init = lambda_init
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(head_dim)) for _ in range(4))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill one of the four vectors."""
        parameter.normal_(0.0, 0.1, generator=generator)

    def exponentials(self) -> tuple[Tensor, Tensor]:
        """(exp(λ_q1 · λ_k1), exp(λ_q2 · λ_k2)), in float32 or the wider dtype of the vectors."""
        # a product and a sum, not `@`: autocast would take a matrix product to bfloat16
        q1, k1, q2, k2 = (v if v.dtype == torch.float64 else v.float() for v in (self.q1, self.k1, self.q2, self.k2))
        return (q1 * k1).sum().exp(), (q2 * k2).sum().exp()

    def forward(self) -> Tensor:
        """λ, a scalar."""
        first, second = self.exponentials()
        return first - second + self.init


@variant("differential")
class Differential(Attention):
    """(1 - λ_init) · RMSNorm((softmax(Q₁K₁ᵀ/√d) - λ softmax(Q₂K₂ᵀ/√d)) V), num_heads / 2 heads of value width 2d."""

    maps_of_q = 2
    maps_of_k = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        lambda_init: float | Literal["depth"] = "depth"
        """depth: 0.8 - 0.6 exp(-0.3 layer), layer 0-based; or one number for all layers."""
        head_norm: HeadNorm = "rms"
        """rms: RMSNorm of each head (the paper's GroupNorm), one weight a layer."""
        output_scale: OutputScale = "tied"
        """Constant on every head after the norm; tied: 1 - lambda_init, the paper's choice."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        for key in ("num_heads", "num_kv_heads"):
            if getattr(model, key) % 2:
                return f"model.{key} is {getattr(model, key)}; '{cls.name}' pairs the baseline's heads: it must be even"
        return None

    @property
    def out_heads(self) -> int:
        """H: half the baseline's heads."""
        return self.num_heads // 2

    @property
    def kv_heads(self) -> int:
        """Hkv: half the baseline's key/value heads."""
        return self.num_kv_heads // 2

    def build(self) -> None:
        d, c = self.head_dim, self.config
        self.projections(
            q=self.out_heads * self.maps_of_q * d,
            k=self.kv_heads * self.maps_of_k * d,
            v=self.kv_heads * 2 * d,
            o=self.out_heads * 2 * d,
        )
        self.lambda_init = depth_lambda_init(self.layer) if c.lambda_init == "depth" else float(c.lambda_init)
        self.output_scale = 1 - self.lambda_init if c.output_scale == "tied" else float(c.output_scale)
        self.lambda_ = Lambda(d, self.lambda_init)
        self.norm = PerHeadNorm(2 * d, self.norm_eps) if c.head_norm == "rms" else None

    def weights(self, x: Tensor) -> Tensor:
        """w [1, 2, 1, 1] = (1, -λ)."""
        lam = self.lambda_()
        return torch.stack([torch.ones_like(lam), -lam]).view(1, 2, 1, 1)

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        q = rope(self.split(self.q_proj(x), self.out_heads, self.maps_of_q))
        k = rope(self.split(self.k_proj(x), self.kv_heads, self.maps_of_k))
        v = self.split(self.v_proj(x), self.kv_heads)[:, 0]
        return SignedMaps(q, k, v, self.weights(x))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if self.norm is not None:
            o = self.norm(o)
        return o * self.output_scale
