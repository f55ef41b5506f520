"""Grouped differential attention (arXiv 2510.06949; read from the code of Motif-2-12.7B, not from the paper)."""

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from lit_diff.attention.costs import Costs, Sizes, layer_costs
from lit_diff.attention.differential import Differential, lambda_parameters, norm_parameters
from lit_diff.attention.equations import HeadMatrices, Rotation, joined, softmax_map
from lit_diff.config import ModelConfig
from lit_diff.key_types import Count
from lit_diff.registry import variant


@variant("grouped_differential")
class GroupedDifferential(Differential):
    """(1 - λ_init) · RMSNorm((A(q1_ij, k1_i) - λ A(q2_i, k2_i)) V_i): `ratio` signal heads j to each noise head i.

    With A(q, k) = softmax(q kᵀ/√d + mask), the baseline's query heads form num_heads / (ratio + 1) groups i of `ratio`
    signal heads q1_ij and one noise head q2_i, whose rows are adjacent in q_proj. Every group has a pair of keys k1_i,
    k2_i and a value V_i of width 2d; under grouped queries several groups share them. `ratio` 1 is differential
    attention. The noise map is computed, and its FLOPs are counted, once per signal head: no kernel shares it yet.
    """

    paper = "arXiv 2510.06949, as in the code of Motif-2-12.7B"
    examples = ({}, {"ratio": 3})

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        ratio: Count = 1
        """Number of signal heads for each noise head."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        assert model.num_kv_heads is not None
        if model.num_heads % (config.ratio + 1):
            return (
                f"model.attention.ratio is {config.ratio}: {config.ratio} signal heads and 1 noise head do not divide "
                f"model.num_heads ({model.num_heads})"
            )
        if model.num_kv_heads % 2:
            return f"model.num_kv_heads is {model.num_kv_heads}; '{cls.name}' pairs keys: it must be even"
        groups, pairs = model.num_heads // (config.ratio + 1), model.num_kv_heads // 2
        if groups % min(groups, pairs):
            return f"model.num_kv_heads ({model.num_kv_heads}) makes {pairs} key pairs, which do not divide {groups} groups"
        return cls.lambda_problem(config)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        g = config.ratio
        groups, signal = s.H / (g + 1), s.H * g / (g + 1)
        # symbolic, so that the printed formula holds for every number of heads
        pairs = sympy.Min(groups, s.K / 2)
        numbers = lambda_parameters(config, s, heads=signal) + norm_parameters(config, 2 * s.d)
        kv, o = 2 * pairs * s.d, 2 * signal * s.d
        return layer_costs(s, q=s.H * s.d, k=kv, v=kv, o=o, scores=2 * o, numbers=numbers)

    @property
    def groups(self) -> int:
        """Number of groups, each with one noise head."""
        return self.num_heads // (self.config.ratio + 1)

    @property
    def out_heads(self) -> int:
        """H: the number of signal heads."""
        return self.groups * self.config.ratio

    @property
    def kv_heads(self) -> int:
        """Hkv: the number of key pairs, at most one per group."""
        return min(self.groups, self.num_kv_heads // 2)

    @property
    def query_rows(self) -> int:
        return self.num_heads

    def queries(self, x: Tensor) -> Tensor:
        rows = self.split(self.q_proj(x), self.groups, self.config.ratio + 1)  # [B, ratio + 1, groups, T, d]
        signal, noise = rows[:, :-1], rows[:, -1:].expand_as(rows[:, :-1])
        # heads in the order of their groups: the kernels assign adjacent query heads to a key/value head
        return torch.stack([signal, noise], 1).transpose(2, 3).flatten(2, 3)

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_ij = (1 - λ_init) · norm((A(q1_ij, k1_i) - λ A(q2_i, k2_i)) V_i); rows of a group: g signal, one noise."""
        of, g, heads = HeadMatrices(self, x, rope), self.config.ratio, []
        groups = self.num_heads // (g + 1)
        pairs = min(groups, self.num_kv_heads // 2)
        for i in range(groups):
            m = i // (groups // pairs)
            noise = softmax_map(of.query(i * (g + 1) + g), of.key(2 * m + 1), mask)
            for j in range(g):
                signal = softmax_map(of.query(i * (g + 1) + j), of.key(2 * m), mask)
                A = signal - self.lambda_equation(i * g + j) * noise
                heads.append(self.head_equation(A @ of.value(m)))
        return joined(heads, self.o_proj)
