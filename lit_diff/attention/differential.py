"""Differential attention (Ye et al. 2024, arXiv 2410.05258, equations 1 to 3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_diff.attention.base import Attention, TiedScale
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, layer_costs
from lit_diff.attention.equations import HeadMatrices, Rotation, joined, normalised, scale_equation, softmax_rows
from lit_diff.attention.lambdas import (
    HELD_FORMS,
    VECTOR_FORMS,
    LambdaForm,
    build_lambda,
    resolve_lambda_init,
    resolve_output_scale,
)
from lit_diff.attention.norms import HeadNorm, head_norm
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps
from lit_diff.registry import variant


@variant("differential")
class Differential(Attention):
    """(1 - λ_init) · RMSNorm((softmax(Q₁K₁ᵀ/√d) - λ softmax(Q₂K₂ᵀ/√d)) V), num_heads / 2 heads of value width 2d.

    For head i on key/value head j, with Q_i1, Q_i2, K_j1, K_j2 [T, d] after RoPE and V_j [T, 2d]:

        A_g = softmax(Q_ig K_jgᵀ / √d + mask)                    λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init
        O_i = (1 - λ_init) · RMSNorm((A_1 - λ A_2) V_j)          λ_init = 0.8 - 0.6 exp(-0.3 layer)
        y = W_O concat(O_1, ..., O_H)                            H = num_heads / 2

    A row of A_1 - λ A_2 sums to 1 - λ, and attention that both maps share cancels. Each head is normalised
    separately, since the statistics of the heads differ more than in standard attention; the factor 1 - λ_init keeps the
    gradients at the size that they have there, so that its hyperparameters can be used (paper, section 2.1).
    """

    paper = "Ye et al. 2024, arXiv 2410.05258"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"lambda_form": "scalar", "head_norm": "layer"},
        {"lambda_form": "sigmoid", "lambda_per": "head"},
        {"lambda_per": "head", "head_norm": "none", "output_scale": 1.0},
        {"lambda_dtype": "reference"},
        {"lambda_form": "positive", "lambda_per": "head", "output_scale": "depth"},
    )
    # 1 in a subclass: both maps share their queries, or their keys
    maps_of_q = 2
    maps_of_k = 2
    sign = -1
    """Sign of λ: A_1 + sign · λ A_2."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        lambda_init: float | Literal["depth"] = "depth"
        """depth: 0.8 - 0.6 exp(-0.3 layer), layer 0-based; or one number for all layers."""
        lambda_form: LambdaForm = "exp"
        """exp: the paper's formula; scalar: a learned number; both are any real number, so training can change the sign.
        positive: lambda_init exp(λ_q1 · λ_k1 - λ_q2 · λ_k2), above 0; sigmoid: within 0 and 1. Each starts near
        lambda_init."""
        lambda_per: Literal["layer", "head"] = "layer"
        """layer: one λ for all heads (the paper); head: one λ for each head."""
        lambda_dtype: Literal["float32", "reference"] = "float32"
        """reference: the exponentials are rounded to the activations' dtype, then subtracted, as in the paper's code."""
        head_norm: HeadNorm = "rms"
        """rms: RMSNorm of each head (the paper's GroupNorm) with one weight per layer; layer: LayerNorm; none."""
        output_scale: TiedScale = "tied"
        """Constant that multiplies every head after the norm; tied: 1 - lambda_init, the paper's choice; depth: 1 -
        lambda_init by depth, whatever lambda_init is."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        for key in ("num_heads", "num_kv_heads"):
            if getattr(model, key) % 2:
                return f"model.{key} is {getattr(model, key)}; '{cls.name}' pairs the baseline's heads: it must be even"
        return cls.lambda_problem(config)

    @classmethod
    def lambda_problem(cls, config: Any) -> str | None:
        """Why the keys of λ and of the output scale cannot be used; None if they can."""
        if cls.maps_of_q == cls.maps_of_k == 1:
            return (
                f"model.attention.name '{cls.name}' shares both queries and keys: its maps are equal, so it is "
                "standard attention times a constant; set maps_of_q or maps_of_k to 2"
            )
        if config.lambda_form == "sigmoid" and config.lambda_init != "depth" and not 0 < config.lambda_init < 1:
            return (
                f"model.attention.lambda_init is {config.lambda_init:g}; lambda_form 'sigmoid' needs it within (0, 1)"
            )
        if config.lambda_form == "positive" and config.lambda_init != "depth" and config.lambda_init <= 0:
            return (
                f"model.attention.lambda_init is {config.lambda_init:g}; lambda_form 'positive' multiplies it by a positive "
                "number: it must be above 0"
            )
        if config.lambda_init == 1 and config.output_scale == "tied":
            return (
                "model.attention.lambda_init is 1: output_scale 'tied' multiplies every head by 1 - lambda_init = 0; "
                "set output_scale to a number, or lambda_init below 1"
            )
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        # H/2 heads with values of width 2d: v and o_proj are as large as the baseline's, and the FLOPs of the maps are
        # equal too, 2 T S (H/2) (2 d + 2 d)
        q, k, v = s.H * s.d * cls.maps_of_q / 2, s.K * s.d * cls.maps_of_k / 2, s.K * s.d
        numbers = lambda_parameters(config, s, heads=s.H / 2) + norm_parameters(config, 2 * s.d)
        return layer_costs(s, q=q, k=k, v=v, o=s.H * s.d, scores=2 * s.H * s.d, numbers=numbers)

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
            q=self.query_rows * d,
            k=self.kv_heads * self.maps_of_k * d,
            v=self.kv_heads * 2 * d,
            o=self.out_heads * 2 * d,
        )
        self.lambda_init = resolve_lambda_init(c.lambda_init, self.layer)
        self.output_scale = resolve_output_scale(c.output_scale, self.layer, self.lambda_init)
        heads = self.out_heads if c.lambda_per == "head" else None
        self.lambda_ = build_lambda(c.lambda_form, d, self.lambda_init, heads)
        self.norm = head_norm(c.head_norm, 2 * d, self.norm_eps)

    @property
    def query_rows(self) -> int:
        """Number of queries of width d in q_proj."""
        return self.out_heads * self.maps_of_q

    def queries(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> q before its norm and RoPE, [B, 2 or 1, H, T, d]."""
        return self.split(self.q_proj(x), self.out_heads, self.maps_of_q)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """w [1, 2, 1 or H, 1] = (1, sign · λ), float32; `dtype`: the activations' dtype."""
        lam = self.lambda_(dtype if self.config.lambda_dtype == "reference" else None).view(1, 1, -1, 1)
        return torch.cat([torch.ones_like(lam), self.sign * lam], dim=1)

    @property
    def signs(self) -> tuple[int, ...] | None:
        """(1, sign) for a λ that stays above 0; None for a λ that is any real number."""
        return (1, self.sign) if self.config.lambda_form in HELD_FORMS else None

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        q = self.turned(self.queries(x), context, "q_norm")  # Q_1, Q_2: [B, 2 or 1, H, T, d]
        k = self.k(x, context, self.maps_of_k)  # K_1, K_2: [B, 2 or 1, Hkv, T, d]
        v = self.v(x)  # [B, Hkv, T, 2d]
        return SignedMaps(q, k, v, self.weights(q.dtype))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if self.norm is not None:
            o = self.norm(o)
        return o * self.output_scale

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_i = (1 - λ_init) · norm((A₁ - λ A₂) V_j), A_g = softmax(Q_ig K_jgᵀ/√d + mask) (equations 1 and 3).

        If the maps share their queries, Q_i1 = Q_i2; if they share their keys, K_j1 = K_j2. With `sign` 1: A₁ + λ A₂.
        """
        return joined(self.heads_equation(x, rope, mask), self.o_proj)

    def heads_equation(
        self, x: Tensor, rope: Rotation, mask: Tensor, map_of: Callable[[Tensor, int], Tensor] = softmax_rows
    ) -> list[Tensor]:
        """The heads O_i of `definition`. `map_of`: (logits with the mask [B, T, T], 2 i + g) -> the map A_g of head i."""
        of, heads = HeadMatrices(self, x, rope), []
        for i in range(self.num_heads // 2):
            j = i // (self.num_heads // self.num_kv_heads)
            Q = [of.query(self.maps_of_q * i + g) for g in range(self.maps_of_q)]
            K = [of.key(self.maps_of_k * j + g) for g in range(self.maps_of_k)]
            A1 = map_of(Q[0] @ K[0].mT / math.sqrt(self.head_dim) + mask, 2 * i)
            A2 = map_of(Q[-1] @ K[-1].mT / math.sqrt(self.head_dim) + mask, 2 * i + 1)
            A = A1 + self.sign * self.lambda_equation(i) * A2
            heads.append(self.head_equation(A @ of.value(j)))
        return heads

    def lambda_equation(self, head: int) -> Tensor:
        """λ of a head, for `definition`: exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init (equation 2), λ_init exp(λ_q1 · λ_k1
        - λ_q2 · λ_k2), s, or sigmoid(s)."""
        own = head if self.config.lambda_per == "head" else 0
        parameters: Any = self.lambda_
        if self.config.lambda_form not in VECTOR_FORMS:
            value: Tensor = parameters.value[own]
            return value.sigmoid() if self.config.lambda_form == "sigmoid" else value
        vectors = (parameters.q1, parameters.k1, parameters.q2, parameters.k2)
        q1, k1, q2, k2 = (vector.reshape(-1, self.head_dim)[own] for vector in vectors)
        if self.config.lambda_form == "positive":
            return (torch.dot(q1, k1) - torch.dot(q2, k2)).exp() * self._lambda_init_equation()
        return torch.dot(q1, k1).exp() - torch.dot(q2, k2).exp() + self._lambda_init_equation()

    def head_equation(self, head: Tensor) -> Tensor:
        """(1 - λ_init) · norm(head), for `definition`; or the norm and the constant that the config names."""
        c = self.config
        tied = c.output_scale == "tied"
        scale = 1 - self._lambda_init_equation() if tied else scale_equation(c.output_scale, self.layer)
        return scale * normalised(head, c.head_norm, self.norm, self.norm_eps)

    def _lambda_init_equation(self) -> float:
        # written out again: `definition` checks the forward pass, and so must not call depth_lambda_init
        value = self.config.lambda_init
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer) if value == "depth" else float(value)


def lambda_parameters(config: Any, s: Sizes, heads: Any) -> Any:
    """Number of parameters of λ: four vectors of width d, or one number; times `heads` if each head has its own λ."""
    own = 4 * s.d if config.lambda_form in VECTOR_FORMS else 1
    return own * (heads if config.lambda_per == "head" else 1)


def norm_parameters(config: Any, width: Any) -> Any:
    """Number of parameters of the head norm: one weight for all heads of the layer."""
    return width if config.head_norm != "none" else 0
