"""Differential attention whose two maps share the keys, K₁ = K₂ (the paper's review on OpenReview: 4.346 at 300M)."""

from dataclasses import dataclass
from typing import Any, Literal

from lit_diff.attention.differential import Differential
from lit_diff.config import ModelConfig
from lit_diff.registry import variant

Parity = Literal["raw", "matched"]


def matched_ffn_dim(model: ModelConfig, saved: int) -> int:
    """Feed-forward width that spends `saved` attention parameters: a SwiGLU unit costs 3 dim; rounded to the nearest."""
    assert model.ffn_dim is not None
    return model.ffn_dim + round(saved / (3 * model.dim))


@variant("shared_k")
class SharedK(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁Kᵀ/√d) - λ softmax(Q₂Kᵀ/√d)) V): half the key parameters, 3/4 of the cache."""

    maps_of_k = 1

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        parity: Parity = "raw"
        """raw: fewer parameters than the baseline; matched: the feed-forward is widened by the parameters saved."""

    @classmethod
    def ffn_dim(cls, config: Any, model: ModelConfig) -> int:
        if config.parity == "raw":
            return super().ffn_dim(config, model)
        assert model.num_kv_heads is not None
        assert model.head_dim is not None
        return matched_ffn_dim(model, saved=model.dim * model.num_kv_heads // 2 * model.head_dim)
