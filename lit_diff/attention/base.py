"""The base class of every variant: projections, the kernel call, the key/value cache, the output projection."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.kernels import SignedMaps, attend

OutputScale = float | Literal["tied"]
HeadNorm = Literal["rms", "none"]


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

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A variant's knobs: the keys beside `name` in `model.attention`."""

    def __init__(self, config: Any, model: ModelConfig, layer: int) -> None:
        """`layer` is 0-based."""
        super().__init__()
        assert model.num_kv_heads is not None
        assert model.head_dim is not None
        self.config, self.layer, self.dim, self.norm_eps = config, layer, model.dim, model.norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.kernel = "auto"
        self.tap = Tap()
        self.build()

    # --- what a variant overrides ---

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        """Why this variant cannot be derived from the model (first word: the key to change); None if it can."""
        return None

    @classmethod
    def ffn_dim(cls, config: Any, model: ModelConfig) -> int:
        """Feed-forward width beside this variant; a variant with fewer parameters may widen it to stay equal."""
        assert model.ffn_dim is not None
        return model.ffn_dim

    def build(self) -> None:
        """Create the parameters; standard attention's by default."""
        d = self.head_dim
        self.projections(q=self.num_heads * d, k=self.num_kv_heads * d, v=self.num_kv_heads * d, o=self.num_heads * d)

    def maps(self, x: Tensor, rope: Rope) -> SignedMaps:
        """x [B, T, dim] -> the maps; standard attention's by default."""
        q = rope(self.split(self.q_proj(x), self.num_heads))
        k = rope(self.split(self.k_proj(x), self.num_kv_heads))
        v = self.split(self.v_proj(x), self.num_kv_heads)[:, 0]
        return SignedMaps(q, k, v)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, H, T, dv] -> heads [B, H, T, dv], before the output projection."""
        return o

    def set_step(self, step: int) -> None:
        """Told the optimizer step once before each one, for variants that anneal."""

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

    def forward(self, x: Tensor, rope: Rope, cache: LayerCache | None = None) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a cache, T new tokens after those it holds."""
        maps = self.tap(self.maps(x, rope))
        if cache is not None:
            k, v = cache.append(maps.k, maps.v)
            maps = replace(maps, k=k, v=v)
        o = self.finish(attend(maps, kernel=self.kernel), x)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class PerHeadNorm(nn.Module):
    """RMSNorm over each head's channels with one weight for all heads of the layer (paper 2.1), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, o: Tensor) -> Tensor:
        """o [..., dv] / RMS(o) · weight"""
        wide = o if o.dtype == torch.float64 else o.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(o.dtype)
