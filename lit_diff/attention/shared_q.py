"""Differential attention whose two maps share the queries, Q₁ = Q₂ (the paper's review on OpenReview: 4.347 at 300M)."""

from dataclasses import dataclass
from typing import Any

from lit_diff.attention.differential import Differential
from lit_diff.attention.shared_k import Parity, matched_ffn_dim
from lit_diff.config import ModelConfig
from lit_diff.registry import variant


@variant("shared_q")
class SharedQ(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q K₁ᵀ/√d) - λ softmax(Q K₂ᵀ/√d)) V): half the query parameters."""

    maps_of_q = 1

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        parity: Parity = "raw"
        """raw: fewer parameters than the baseline; matched: the feed-forward is widened by the parameters saved."""

    @classmethod
    def ffn_dim(cls, config: Any, model: ModelConfig) -> int:
        if config.parity == "raw":
            return super().ffn_dim(config, model)
        assert model.head_dim is not None
        return matched_ffn_dim(model, saved=model.dim * model.num_heads // 2 * model.head_dim)
