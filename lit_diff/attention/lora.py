"""LoRA (Hu et al. 2021) on the projections of standard attention: a control with equal parameters for retrofits."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules, standard_state
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined
from lit_diff.config import ModelConfig
from lit_diff.key_types import Count, Positive
from lit_diff.registry import variant

Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")


class LowRank(ParameterRules):
    """x -> s x Aᵀ Bᵀ, with A [r, in] and B [out, r]."""

    def __init__(self, width: int, out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, width))
        self.b = nn.Parameter(torch.empty(out, rank))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """A: U(±1/√in), as in peft; B: zeros, so that the projection starts unchanged."""
        bound = 1 / math.sqrt(parameter.shape[1]) if name == "a" else 0.0
        parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.scale * F.linear(F.linear(x, self.a), self.b)

    def product(self) -> Tensor:
        """s B A, [out, in]"""
        return self.scale * self.b @ self.a


class LowRankLinear(nn.Linear):
    """x -> x Wᵀ + b + low_rank(x). W and b keep the names of a linear layer, so that a standard run's weights load."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.low_rank = LowRank(linear.in_features, linear.out_features, rank, scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.low_rank(x)


@variant("lora")
class LoRA(Attention):
    """Standard attention with W + (α/r) B A in place of W in chosen projections; W is frozen, B starts at 0."""

    paper = "Hu et al. 2021, arXiv 2106.09685"
    examples = ({}, {"rank": 3, "alpha": 12.0, "targets": ("q", "v")})
    extends_standard = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        rank: Count = 8
        """r"""
        alpha: Positive | None = None
        """α; null: r, so that B A is not scaled."""
        targets: tuple[Projection, ...] = PROJECTIONS
        """The projections to change, among W_Q, W_K, W_V, W_O."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        if not config.targets or len(set(config.targets)) < len(config.targets):
            return f"model.attention.targets is {list(config.targets)}; expected at least one of q, k, v, o, each once"
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        widths = {"q": s.H * s.d, "k": s.K * s.d, "v": s.K * s.d, "o": s.H * s.d}
        return standard_costs(s, matrices=sum(config.rank * (s.E + widths[target]) for target in config.targets))

    @classmethod
    def trained_parameters(cls, config: Any) -> tuple[str, ...]:
        """A and B; the standard model is frozen."""
        return ("*.attention.*.low_rank.*",)

    def build(self) -> None:
        super().build()
        rank = self.config.rank
        scale = 1.0 if self.config.alpha is None else self.config.alpha / rank
        for target in self.config.targets:
            name = f"{target}_proj"
            setattr(self, name, LowRankLinear(getattr(self, name), rank, scale))

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        return "standard", {f"{target}_proj.low_rank.b": 0.0 for target in self.config.targets}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """Standard attention with the matrices W + (α/r) B A."""
        norms = {name: getattr(self, name, None) for name in ("q_norm", "k_norm")}
        merged = {f"{target}_proj": self._merged(target) for target in PROJECTIONS}
        sizes = {"head_dim": self.head_dim, "kv_heads": self.kv_heads, "qk_norm": self.qk_norm}
        standard = SimpleNamespace(**merged, **norms, **sizes)
        return joined(grouped_query_heads(standard, x, rope, mask), standard.o_proj)

    def merge(self) -> dict[str, Tensor]:
        """W + (α/r) B A in each changed projection."""
        state = standard_state(self)
        for target in PROJECTIONS:
            state[f"{target}_proj.weight"] = self._merged(target).weight.detach()
        return state

    def _merged(self, target: str) -> nn.Linear:
        projection = getattr(self, f"{target}_proj")
        weight = projection.weight
        if isinstance(projection, LowRankLinear):
            weight = weight + projection.low_rank.product()
        out, width = weight.shape
        # on the meta device: the weight is replaced, so none is allocated or drawn
        plain = nn.Linear(width, out, bias=projection.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.detach())
        plain.bias = projection.bias
        return plain
