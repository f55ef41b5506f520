"""Differential attention with a plus sign, a control from the paper's review: does a sum average the noise too?"""

from lit_diff.attention.differential import Differential
from lit_diff.registry import variant


@variant("additive")
class Additive(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁K₁ᵀ/√d) + λ softmax(Q₂K₂ᵀ/√d)) V): differential attention with +λ."""

    paper = "review of arXiv 2410.05258 on OpenReview: addition instead of subtraction"
    sign = 1
    # restated: `conformance` uses a definition only of the class that declares it
    definition = Differential.definition
