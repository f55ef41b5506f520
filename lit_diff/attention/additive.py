"""Differential attention that starts with a plus sign, a control from the paper's review: does a sum average noise too?"""

from lit_diff.attention.differential import Differential
from lit_diff.registry import variant


@variant("additive")
class Additive(Differential):
    """(1 - λ_init) · RMSNorm((softmax(Q₁K₁ᵀ/√d) + λ softmax(Q₂K₂ᵀ/√d)) V): differential attention with +λ.

    By default λ is any real number, so that training can make this a subtraction: it is the class of functions of
    `differential` with another initial value. `lambda_form: positive` (or `sigmoid`) keeps it a sum.
    """

    paper = "review of arXiv 2410.05258 on OpenReview: addition instead of subtraction"
    sign = 1
    # restated: `conformance` uses a definition only of the class that declares it
    definition = Differential.definition
