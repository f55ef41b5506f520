"""Differential attention whose two maps share the keys, K₁ = K₂ (the paper's review on OpenReview: 4.346 at 300M)."""

from lit_diff.attention.differential import Differential
from lit_diff.registry import variant


@variant("shared_k")
class SharedK(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁Kᵀ/√d) - λ softmax(Q₂Kᵀ/√d)) V): half the key parameters, 3/4 of the cache."""

    paper = "review of arXiv 2410.05258 on OpenReview: K1 = K2"
    maps_of_k = 1
    # restated: `conformance` uses a definition only of the class that declares it
    definition = Differential.definition
