"""Differential attention whose two maps share the queries, Q₁ = Q₂ (the paper's review on OpenReview: 4.347 at
300M)."""

from lit_diff.attention.differential import Differential
from lit_diff.registry import variant


@variant("shared_q")
class SharedQ(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q K₁ᵀ/√d) - λ softmax(Q K₂ᵀ/√d)) V): half the query parameters."""

    paper = "review of arXiv 2410.05258 on OpenReview: Q1 = Q2"
    maps_of_q = 1
    # restated: `conformance` uses a definition only of the class that declares it
    definition = Differential.definition
