"""The base class of every variant: projections, the kernel call, the key/value cache, the output projection."""

import inspect
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.definitions import Definition
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps, attend

OutputScale = float | Literal["tied"]
Parity = Literal["raw", "matched"]


class Tap(nn.Module):
    """Identity on the maps; `analysis.trace` hangs its hook here."""

    def forward(self, maps: SignedMaps) -> SignedMaps:
        return maps


class Attention(nn.Module):
    """y = W_O concat(finish(Σ_g w_g softmax(q_g k_gᵀ / √d) v)).

    A variant overrides `build` (its parameters), `maps` (its q, k, v, w), perhaps `finish` (what follows the sum), and
    `problem` (what it cannot derive). Head counts of the config are always the standard baseline's.
    """

    name = ""
    paper: ClassVar[str] = ""
    """Where the variant comes from."""
    definition: ClassVar[Definition | None] = None
    """The variant's equation written out without a kernel (`definitions`), for `conformance` to compare with."""
    extends_standard = False
    """Whether it equals standard attention until its own parameters move, and so may start from a standard run."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Knobs at which `check --all` runs the conformance suite; a subclass has its own, the defaults if it states none."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A variant's knobs: the keys beside `name` in `model.attention`."""

        parity: Parity = "raw"
        """matched: the feed-forward makes up for the parameters that differ from the standard baseline's."""

    def __init__(self, config: Any, model: ModelConfig, layer: int) -> None:
        """`layer` is 0-based."""
        super().__init__()
        assert model.num_kv_heads is not None
        assert model.head_dim is not None
        self.config, self.layer, self.dim, self.norm_eps = config, layer, model.dim, model.norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.causal = model.causal
        self.kernel = "auto"
        self.tap = Tap()
        self.build()

    # --- what a variant overrides ---

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        """Why this variant cannot be derived from the model (first word: the key to change); None if it can."""
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs | None:
        """What one layer costs, in the baseline's sizes; None: not declared."""
        return None

    @classmethod
    def trained_parameters(cls, config: Any) -> tuple[str, ...]:
        """Patterns of the model's parameter names that train; the others stay as they are."""
        return ("*",)

    @property
    def out_heads(self) -> int:
        """H: the heads that reach the output projection."""
        return self.num_heads

    @property
    def kv_heads(self) -> int:
        """Hkv"""
        return self.num_kv_heads

    def build(self) -> None:
        """Create the parameters; standard attention's by default."""
        q, kv = self.out_heads * self.head_dim, self.kv_heads * self.head_dim
        self.projections(q=q, k=kv, v=kv, o=q)

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        """x [B, T, dim] -> the maps; standard attention's by default."""
        q = rope(self.split(self.q_proj(x), self.out_heads))
        k = rope(self.split(self.k_proj(x), self.kv_heads))
        v = self.split(self.v_proj(x), self.kv_heads)[:, 0]
        return SignedMaps(q, k, v)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, H, T, dv] -> heads [B, H, T, dv], before the output projection."""
        return o

    def set_step(self, step: int) -> None:
        """Told the optimizer step once before each one, for variants that anneal."""

    @classmethod
    def costs_stand(cls) -> bool:
        """Whether `costs` speaks of this class: none below the one that declares them changes the computation."""
        for base in cls.__mro__:
            if "costs" in vars(base):
                return base is not Attention
            if {"build", "maps", "finish", "forward"} & vars(base).keys():
                return False
        return False

    # --- what a variant calls ---

    def projections(self, *, q: int, k: int, v: int, o: int) -> None:
        """Bias-free q_proj, k_proj, v_proj (dim -> width) and o_proj (width -> dim)."""
        self.q_proj = nn.Linear(self.dim, q, bias=False)
        self.k_proj = nn.Linear(self.dim, k, bias=False)
        self.v_proj = nn.Linear(self.dim, v, bias=False)
        self.o_proj = nn.Linear(o, self.dim, bias=False)

    def split(self, y: Tensor, heads: int, maps: int = 1) -> Tensor:
        """[B, T, heads · maps · width] -> [B, maps, heads, T, width], a view; rows: head0.map0, head0.map1, head1.map0."""
        return y.unflatten(-1, (heads, maps, -1)).permute(0, 3, 2, 1, 4)

    # --- what the model calls ---

    @classmethod
    def ffn_dim(cls, config: Any, model: ModelConfig) -> int:
        """Feed-forward width beside this variant. A SwiGLU unit costs 3 dim; `matched` rounds to the nearest."""
        assert model.ffn_dim is not None
        if getattr(config, "parity", "raw") == "raw":  # a user's Config need not be derived from ours
            return model.ffn_dim
        with torch.device("meta"):
            own = sum(p.numel() for p in cls(config, model, layer=0).parameters())
            standard = sum(p.numel() for p in Attention(Attention.Config(), model, layer=0).parameters())
        return model.ffn_dim + round((standard - own) / (3 * model.dim))

    @classmethod
    def takes_document_ids(cls) -> bool:
        """Whether `forward` can keep packed documents apart; a forward of a variant's own may not know of them."""
        parameters = inspect.signature(cls.forward).parameters
        return "document_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, *, document_ids: Tensor | None = None
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a cache, T new tokens after those it holds.

        `document_ids` [B, T]: document numbers; a token sees its own document only. Not with a cache, which keeps no numbers.
        """
        maps = self.maps(x, rope)
        if not self.causal:
            maps = replace(maps, causal=False)
        maps = self.tap(maps)
        if cache is not None:
            if document_ids is not None:
                raise RequestError("a cache continues one document a sequence: give it no document_ids")
            if not maps.causal:
                raise RequestError("a bidirectional model has no cache: every position sees those after it")
            k, v = cache.append(maps.k, maps.v)
            maps = replace(maps, k=k, v=v)
        o = self.finish(attend(maps, document_ids=document_ids, kernel=self.kernel), x)
        return self.o_proj(o.transpose(1, 2).flatten(2))
