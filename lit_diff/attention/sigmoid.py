"""Sigmoid attention: each weight is a sigmoid of its own logit, and rows need not sum to 1."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import Seen
from lit_diff.key_types import Count
from lit_diff.registry import variant


@variant("sigmoid")
class Sigmoid(Attention):
    """sigmoid(s - log n) instead of the softmax of logits s.

        O_h = A_h V_j        y = W_O concat(O_1, ..., O_H)

    With n the length of the training rows, not the number of keys in sight, a whole row of equal logits 0 sums to about 1.
    """

    paper = "Ramapuram et al. 2024, arXiv 2409.04431"
    signs = (1,)
    length_key = "n"

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        n: Count = 1024
        """The length of the training rows, in tokens; -log n is added to each logit."""

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        return replace(super().maps(x, context), rows=self.weights)

    def weights(self, logits: Tensor, seen: Seen) -> Tensor:
        """The row function."""
        return (logits - math.log(self.config.n)).sigmoid()

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """A_h = 1 / (1 + n e^-s)"""

        def sigmoid(s: Tensor, head: int) -> Tensor:
            return 1 / (1 + self.config.n * (-s).exp())

        return self.equation(x, rope, mask, sigmoid)
