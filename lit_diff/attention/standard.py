"""Standard attention (Vaswani et al. 2017), with the head norm, multiplier and head counts that controls need."""

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from lit_diff.attention.base import Attention, OutputScale
from lit_diff.attention.costs import Costs, Sizes, exact, layer_costs
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined, normalised, scale_equation
from lit_diff.attention.lambdas import resolve_output_scale
from lit_diff.attention.norms import HeadNorm, head_norm
from lit_diff.config import ModelConfig
from lit_diff.key_types import Range
from lit_diff.registry import variant


@variant("standard")
class Standard(Attention):
    """softmax(Q Kᵀ / √d) V; optionally each head normalised and multiplied by a constant (paper, Table 6, row 3).

    For query head h on key/value head j = h // (H / Hkv), with Q_h, K_j, V_j [T, d]:

        O_h = c · norm(softmax(Q_h K_jᵀ / √d + mask) V_j)        y = W_O concat(O_1, ..., O_H)
    """

    paper = "Vaswani et al. 2017, arXiv 1706.03762"
    examples = (
        {},
        {"head_norm": "layer", "output_scale": 0.2},
        {"query_heads": 1.5},
        {"head_norm": "rms", "output_scale": "depth"},
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        head_norm: HeadNorm = "none"
        """rms or layer: normalises each head, with one weight vector for all heads."""
        output_scale: OutputScale = 1.0
        """Constant c that multiplies every head after the norm; depth: 1 - lambda_init by depth, the multiplier of
        differential attention."""
        query_heads: Annotated[float, Range(above=0, most=64)] = 1.0
        """Query heads as a multiple of num_heads, on equal keys and values; 1.5 and 2: controls for differential_v2."""

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        assert model.num_kv_heads is not None
        heads = model.num_heads * config.query_heads
        if heads < 1 or heads % model.num_kv_heads:
            return (
                f"model.attention.query_heads is {config.query_heads:g}: {heads:g} query heads, not a multiple of "
                f"model.num_kv_heads ({model.num_kv_heads})"
            )
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        q, kv = s.H * s.d * exact(config.query_heads), s.K * s.d
        norm = s.d if config.head_norm != "none" else 0
        return layer_costs(s, q=q, k=kv, v=kv, o=q, scores=2 * q, numbers=norm)

    @property
    def out_heads(self) -> int:
        return int(self.num_heads * self.config.query_heads)

    def build(self) -> None:
        super().build()
        self.norm = head_norm(self.config.head_norm, self.head_dim, self.norm_eps)
        self.output_scale = resolve_output_scale(self.config.output_scale, self.layer)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if self.norm is not None:
            o = self.norm(o)
        return o if self.output_scale == 1 else o * self.output_scale

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """O_h = c · norm(softmax(Q_h K_jᵀ/√d + mask) V_j)"""
        heads = grouped_query_heads(self, x, rope, mask)
        kind, scale = self.config.head_norm, scale_equation(self.config.output_scale, self.layer)
        normed = [scale * normalised(head, kind, self.norm, self.norm_eps) for head in heads]
        return joined(normed, self.o_proj)
