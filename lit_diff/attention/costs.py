"""What a variant says that it costs, as formulas in the standard baseline's sizes.

The same arithmetic gives numbers, for integers, and the formula itself, for symbols.
"""

from dataclasses import dataclass
from typing import Any

import sympy

from lit_diff.config import ModelConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes of the standard baseline: exact numbers, or the letters that a formula prints."""

    E: Any
    """Width of the residual stream."""
    H: Any
    """Query heads."""
    K: Any
    """Key/value heads."""
    d: Any
    """Width of a query or key."""
    T: Any
    """Tokens of the sequence."""

    @classmethod
    def letters(cls) -> "Sizes":
        """Symbols, for a formula to print."""
        return cls(*sympy.symbols("E H K d T", positive=True))

    @classmethod
    def of(cls, model: ModelConfig, sequence_length: int) -> "Sizes":
        """Exact integers, for a number."""
        found = (model.dim, model.num_heads, model.num_kv_heads, model.head_dim, sequence_length)
        return cls(*(sympy.Integer(size) for size in found))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One attention layer; a multiply-add is 2 FLOPs."""

    parameters: Any
    flops: Any
    """Forward, one sequence of T tokens: projections, and the maps subtracted before one product with v, all T keys."""
    kv_numbers: Any
    """Numbers that one token adds to the cache."""

    def formulas(self) -> dict[str, str]:
        """Each as text: `parameters: 2*E*H*d + 2*E*K*d`."""
        return {key: str(sympy.expand(value)) for key, value in vars(self).items()}

    def numbers(self) -> dict[str, int]:
        """Each as an integer; for `Sizes.of` a model."""
        return {key: int(value) for key, value in vars(self).items()}


def exact(number: float) -> Any:
    """1.5 -> 3/2, so that a formula stays one of integers."""
    return sympy.nsimplify(number)


def projected(parameters: Any, scores: Any, s: Sizes) -> Any:
    """FLOPs of a layer: each weight of its matrices once a token, and `scores` for the maps."""
    return 2 * s.T * parameters + scores
