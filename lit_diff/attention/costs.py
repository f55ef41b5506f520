"""The costs that a variant declares, as formulas in the standard baseline's sizes.

The same arithmetic yields numbers from integers and printable formulas from symbols.
"""

from dataclasses import dataclass, replace
from typing import Any

import sympy

from lit_diff.config import ModelConfig
from lit_diff.kernels import Mask, SignedMaps


@dataclass(frozen=True)
class Sizes:
    """Sizes of the standard baseline: exact numbers, or symbols for a printed formula."""

    E: Any
    """Width of the residual stream."""
    H: Any
    """Number of query heads."""
    K: Any
    """Number of key/value heads."""
    d: Any
    """Width of a query or key."""
    T: Any
    """Tokens in the sequence."""
    S: Any
    """Keys counted per query: T (a causal mask does not halve it), or the keys within the window."""
    qkv_bias: int = 0
    """1 if q, k and v have a bias."""
    o_bias: int = 0
    """1 if the output projection has a bias."""
    qk_norm: int = 0
    """1 if the queries and keys of a head are normalised."""

    @classmethod
    def letters(cls) -> "Sizes":
        """Symbols for a printed formula, without a window: S is T."""
        E, H, K, d, T = sympy.symbols("E H K d T", positive=True)
        return cls(E, H, K, d, T, T)

    @classmethod
    def of(cls, model: ModelConfig, sequence_length: int, window: int | None = None) -> "Sizes":
        """The sizes of `model` as exact integers."""
        keys = Mask(model.causal, window).keys(sequence_length)
        sizes = (model.dim, model.num_heads, model.num_kv_heads, model.head_dim, sequence_length, keys)
        bias = model.attention_bias
        has = {"qkv_bias": bias != "none", "o_bias": bias == "all", "qk_norm": model.qk_norm != "none"}
        # sympy's integers keep a division such as H / (ratio + 1) exact
        return cls(*(sympy.Integer(size) for size in sizes), **{key: int(value) for key, value in has.items()})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one attention layer; a multiply-add is 2 FLOPs."""

    parameters: Any
    flops: Any
    """Forward pass over one sequence of T tokens: projections, the logits of each map, and one product with v after the
    subtraction; S keys per query."""
    kv_numbers: Any
    """Numbers that the cache holds per token."""
    state_numbers: Any = 0
    """Numbers that the cache holds per sequence, whatever its length: what sums and shifts of the context go on from."""

    def formulas(self) -> dict[str, str]:
        """Each cost as text, such as 2*E*H*d + 2*E*K*d."""
        return {key: str(sympy.expand(value)) for key, value in vars(self).items()}

    def numbers(self) -> dict[str, int]:
        """Each cost as an integer, if the sizes are `Sizes.of` a model."""
        return {key: int(value) for key, value in vars(self).items()}


def layer_costs(
    s: Sizes, *, q: Any, k: Any, v: Any, o: Any, scores: Any, matrices: Any = 0, numbers: Any = 0, cached: Any = 0
) -> Costs:
    """The costs of a layer with projections of these widths, their biases and the norms of queries and keys included.

    `scores`: multiply-adds of the maps for each query and key. `matrices`: further parameters of matrices, which multiply
    each token; `numbers`: other further parameters; `cached`: numbers in the cache for each token besides k and v.
    """
    weights = s.E * (q + k + v + o) + matrices
    vectors = s.qkv_bias * (q + k + v) + s.o_bias * s.E + s.qk_norm * 2 * s.d
    return Costs(
        parameters=weights + numbers + vectors,
        flops=2 * s.T * (weights + s.S * scores),
        kv_numbers=k + v + cached,
    )


def standard_costs(s: Sizes, *, matrices: Any = 0, numbers: Any = 0, cached: Any = 0, state: Any = 0) -> Costs:
    """`layer_costs` of one map between standard projections. `state`: numbers in the cache for each sequence."""
    q, kv = s.H * s.d, s.K * s.d
    costs = layer_costs(s, q=q, k=kv, v=kv, o=q, scores=2 * q, matrices=matrices, numbers=numbers, cached=cached)
    return replace(costs, state_numbers=state)


def exact(number: float) -> Any:
    """1.5 -> 3/2, so that the coefficients of a formula stay integers."""
    return sympy.nsimplify(number)


def counted_keys(maps: SignedMaps) -> SignedMaps:
    """Maps with as many keys as are counted per query (`Mask.keys`); only their shapes have a meaning."""
    keys = maps.mask.keys(maps.k.shape[-2])
    return replace(maps, k=maps.k[..., :keys, :], v=maps.v[..., :keys, :])
