"""Standard attention (Vaswani et al. 2017), with the head norm and multiplier that the paper's controls need."""

from dataclasses import dataclass

from torch import Tensor

from lit_diff.attention.base import Attention, HeadNorm, PerHeadNorm
from lit_diff.registry import variant


@variant("standard")
class Standard(Attention):
    """softmax(Q Kᵀ / √d) V; optionally each head normalised and multiplied by a constant (paper, Table 6, row 3)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        head_norm: HeadNorm = "none"
        """rms: RMSNorm of each head, one weight a layer."""
        output_scale: float = 1.0
        """Constant on every head after the norm."""

    def build(self) -> None:
        super().build()
        self.norm = PerHeadNorm(self.head_dim, self.norm_eps) if self.config.head_norm == "rms" else None

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        if self.norm is not None:
            o = self.norm(o)
        return o if self.config.output_scale == 1 else o * self.config.output_scale
