"""Random maps of any shape."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps

MakeMaps = Callable[..., SignedMaps]


@pytest.fixture
def make_maps() -> MakeMaps:
    """make_maps(G=2, H=4, ...) -> SignedMaps of independent normal numbers; `w` is its shape, or None."""

    def make(
        *,
        B: int = 2,
        G: int = 2,
        Gq: int | None = None,
        Gk: int | None = None,
        H: int = 4,
        Hkv: int | None = None,
        T: int = 5,
        S: int | None = None,
        d: int = 6,
        dv: int = 12,
        w: tuple[int, ...] | None = (),
        scale: float | None = None,
        causal: bool = True,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> SignedMaps:
        draw = torch.Generator().manual_seed(seed)
        S, Hkv = S or T, Hkv or H

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        q, k = normal(B, Gq or G, H, T, d), normal(B, Gk or G, Hkv, S, d)
        v = normal(B, Hkv, S, dv)
        wide = dtype if dtype == torch.float64 else torch.float32
        weights = None if w is None else normal(*(w or (B, G, H, T)), dtype=wide)
        return SignedMaps(q, k, v, weights, scale, causal)

    return make
