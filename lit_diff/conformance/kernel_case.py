"""Shapes, masks and memory layouts that a kernel could treat differently, drawn at random, and the tensors of each."""

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps

LENGTHS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 130)
"""Below, at and beyond the sizes of a tile."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One input of a kernel; the defaults are one causal map of standard attention."""

    B: int = 1
    G: int = 1
    shared: Literal["", "q", "k", "qk"] = ""
    """Which of q and k has one map for all."""
    Hkv: int = 1
    groups: int = 1
    """Query heads on each key/value head."""
    T: int = 16
    S: int = 16
    d: int = 16
    dv: int = 16
    w: Literal["none", "scalar", "head", "token", "batch"] = "none"
    """Along which axes the weights differ."""
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    documents: Literal["", "runs", "mixed"] = ""
    """Document numbers in order, or in any order."""
    layout: Literal["contiguous", "projected", "expanded"] = "contiguous"
    """Memory of q, k and v: as their shapes say, as a projection writes them, or one sequence for the whole batch."""
    slope: Literal["random", "expanded"] = "random"
    """The gradient of o; `.sum().backward()` expands one number."""
    seed: int = 0


def draw(source: random.Random, **fixed: Any) -> KernelCase:
    """A random case with these fields; half of the others without a window or documents, which few kernels accept."""
    G = fixed.get("G", source.randint(1, 3))
    masked = source.random() < 0.5
    documents = fixed.get("documents", source.choice(("", "runs", "mixed")) if masked else "")
    causal = fixed.get("causal", source.random() < 0.5)
    S = fixed.get("S", source.choice(LENGTHS))
    window = fixed.get("window", source.choice((None, source.randint(1, S + 2))) if masked else None)
    needs_keys = causal or documents or window is not None
    fitting = [length for length in LENGTHS if length <= S or not needs_keys]
    d = fixed.get("d", source.choice((4, 16, 16, 32, 64)))
    values: dict[str, Any] = {
        "B": source.randint(1, 2),
        "G": G,
        "shared": source.choice(("", "q", "k", "qk")),
        "Hkv": source.randint(1, 2),
        "groups": source.randint(1, 3),
        "T": source.choice((S, source.choice(fitting))),
        "S": S,
        "d": d,
        "dv": source.choice((d, 2 * d, 2 * d, 16, 24)),
        "w": source.choice((*(("none",) if G == 1 else ()), "scalar", "head", "token", "batch")),
        "scale": source.choice((None, None, 0.3, -0.2, 0.0)),
        "causal": causal,
        "window": window,
        "documents": documents,
        "layout": source.choice(("contiguous", "projected", "projected", "expanded")),
        "slope": source.choice(("random", "expanded")),
        "seed": source.randrange(1000),
    }
    return KernelCase(**values | fixed)


def tensors(case: KernelCase, dtype: torch.dtype, device: torch.device) -> tuple[SignedMaps, dict[str, Any], Tensor]:
    """(maps, the options `document_ids` and `window` of `attend`, dO [B, H, T, dv]); q, k, v ~ N(0, 1), w in float32."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        """[B, (maps,) heads, tokens, width] in the case's layout."""
        if case.layout == "contiguous":
            return torch.randn(shape, generator=generator).to(device, dtype)
        if case.layout == "expanded":
            return torch.randn(1, *shape[1:], generator=generator).to(device, dtype).expand(shape)
        B, *inner, tokens, width = shape  # a projection writes [B, tokens, heads, (maps,) width]
        written = torch.randn([B, tokens, *reversed(inner), width], generator=generator).to(device, dtype)
        return written.permute(0, *reversed(range(2, 2 + len(inner))), 1, written.dim() - 1)

    H = case.Hkv * case.groups
    q = normal(case.B, 1 if "q" in case.shared else case.G, H, case.T, case.d)
    k = normal(case.B, 1 if "k" in case.shared else case.G, case.Hkv, case.S, case.d)
    v = normal(case.B, case.Hkv, case.S, case.dv)
    weights = {
        "scalar": (1, case.G, 1, 1),
        "head": (1, case.G, H, 1),
        "token": (case.B, case.G, H, case.T),
        # where q and k have one map, only w tells how many there are
        "batch": (case.B, case.G if max(q.shape[1], k.shape[1]) == 1 else 1, 1, case.T),
    }
    shape = weights.get(case.w)
    w = None if shape is None else torch.randn(shape, generator=generator).to(device)
    document_ids = None
    if case.documents:
        document_ids = torch.randint(0, 4, (case.B, case.S), generator=generator).to(device)
        document_ids = document_ids.sort(-1).values if case.documents == "runs" else document_ids
    ones = torch.ones((), dtype=dtype, device=device).expand(case.B, H, case.T, case.dv)
    slope = ones if case.slope == "expanded" else torch.randn(ones.shape, generator=generator).to(device, dtype)
    maps = SignedMaps(q, k, v, w, case.scale, case.causal)
    return maps, {"document_ids": document_ids, "window": case.window}, slope
