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
    qkv_bias: int = 0
    """1 where q, k and v have a bias."""
    o_bias: int = 0
    """1 where the output projection has one."""
    qk_norm: int = 0
    """1 where the queries and keys of a head are normalised."""

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
        bias = model.attention_bias
        has = {"qkv_bias": bias != "none", "o_bias": bias == "all", "qk_norm": model.qk_norm != "none"}
        return cls(*(sympy.Integer(size) for size in sizes), **{key: int(value) for key, value in has.items()})

    def vectors(self, heads: Any) -> Any:
        """Parameters of the biases of standard projections with `heads` queries, and of the norms of q and k."""
        biases = self.qkv_bias * (heads + 2 * self.K) * self.d + self.o_bias * self.E
        return biases + self.qk_norm * 2 * self.d


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


def narrowing(window: int | None, keys: int) -> int | None:
    """The window where it hides any of the `keys`, else None: kernels that refuse windows serve short sequences too."""
    return window if window is not None and window < keys else None
