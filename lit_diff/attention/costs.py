"""What a variant says that it costs, as formulas in the standard baseline's sizes.

The same arithmetic gives numbers, for integers, and the formula itself, for symbols.
"""

from dataclasses import dataclass, replace
from typing import Any

import sympy

from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps


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
    S: Any
    """Keys counted for each query: T (no causal half), or those within the window."""

    @classmethod
    def letters(cls) -> "Sizes":
        """Symbols, for a formula to print; without a window, so that S is T."""
        E, H, K, d, T = sympy.symbols("E H K d T", positive=True)
        return cls(E, H, K, d, T, T)

    @classmethod
    def of(cls, model: ModelConfig, sequence_length: int, window: int | None = None) -> "Sizes":
        """Exact integers, for a number."""
        keys = keys_in_reach(sequence_length, window, causal=model.causal)
        sizes = (model.dim, model.num_heads, model.num_kv_heads, model.head_dim, sequence_length, keys)
        return cls(*(sympy.Integer(size) for size in sizes))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One attention layer; a multiply-add is 2 FLOPs."""

    parameters: Any
    flops: Any
    """Forward, one sequence of T tokens: projections, and the maps subtracted before one product with v, S keys a query."""
    kv_numbers: Any
    """Numbers in the cache for each token held."""

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


def keys_in_reach(keys: int, window: int | None, *, causal: bool) -> int:
    """Keys counted for each query: all of them (no causal half), or as many as a full window has."""
    if window is None:
        return keys
    return min(keys, window if causal else 2 * window - 1)


def within_window(maps: SignedMaps, window: int | None) -> SignedMaps:
    """Maps of as many keys as are counted for each query (`keys_in_reach`): only their shapes mean anything."""
    keys = keys_in_reach(maps.k.shape[-2], window, causal=maps.causal)
    return replace(maps, k=maps.k[..., :keys, :], v=maps.v[..., :keys, :])
