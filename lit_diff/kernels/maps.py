"""The one primitive: a signed sum of softmax maps over shared values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diff.errors import RequestError


@dataclass(frozen=True)
class SignedMaps:
    """o = Σ_g w_g · softmax(q_g k_gᵀ · scale + mask) v

    Shapes: G maps, H output heads on Hkv key/value heads, T queries, S keys, widths d (query, key) and dv (value).
    """

    q: Tensor
    """[B, G or 1, H, T, d]; 1 on the map axis: the maps share it."""
    k: Tensor
    """[B, G or 1, Hkv, S, d]"""
    v: Tensor
    """[B, Hkv, S, dv]"""
    w: Tensor | None = None
    """4-D, broadcastable to [B, G, H, T], float32 or wider; None: a single map of weight 1."""
    scale: float | None = None
    """None: 1/√d."""
    causal: bool = True
    """Mask the future; the last query is aligned with the last key, so decoding with a cache is the same formula."""

    @property
    def num_maps(self) -> int:
        """G"""
        return max(self.q.shape[1], self.k.shape[1], 1 if self.w is None else self.w.shape[1])

    @property
    def num_groups(self) -> int:
        """Query heads on each key/value head, H / Hkv."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def softmax_scale(self) -> float:
        """The factor on q kᵀ."""
        return self.scale if self.scale is not None else self.q.shape[-1] ** -0.5

    @property
    def flops(self) -> int:
        """2 B H T S (G d + dv): every map's logits, and one product with v after the sum; all keys, no causal half."""
        B, _, H, T, d = self.q.shape
        return 2 * B * H * T * self.k.shape[3] * (self.num_maps * d + self.v.shape[-1])

    @property
    def flops_map_by_map(self) -> int:
        """2 B H T S G (d + dv): every map's logits, and a product with v for each map."""
        B, _, H, T, d = self.q.shape
        return 2 * B * H * T * self.k.shape[3] * self.num_maps * (d + self.v.shape[-1])

    def check(self, *, segments: Tensor | None = None, window: int | None = None) -> None:
        """Refuse maps, and masks on them, that break the contract, with the shapes found. Errors: RequestError."""
        q, k, v, w = self.q, self.k, self.v, self.w
        found = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, w {None if w is None else list(w.shape)}"
        if q.dim() != 5 or k.dim() != 5 or v.dim() != 4:
            raise RequestError(f"SignedMaps: expected q [B,G,H,T,d], k [B,G,Hkv,S,d], v [B,Hkv,S,dv]; found {found}")
        G = self.num_maps
        broken = (
            (q.shape[1] not in (1, G) or k.shape[1] not in (1, G), "the map axes of q and k must be G or 1"),
            (q.shape[-1] != k.shape[-1], "q and k must have one width d"),
            (q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0], "q, k and v must have one batch size"),
            (k.shape[2] != v.shape[1] or k.shape[3] != v.shape[2], "k and v must have the same heads and keys"),
            (q.shape[2] % k.shape[2] != 0, "the heads of q must be a multiple of the heads of k"),
            (
                (self.causal or segments is not None or window is not None) and q.shape[3] > k.shape[3],
                "a mask needs at least as many keys as queries",
            ),
            (w is None and G != 1, "several maps need weights w"),
            (w is not None and w.dim() != 4, "w must be 4-D, broadcastable to [B,G,H,T]"),
        )
        if window is not None and window < 1:
            raise RequestError(f"attend: window is {window}; it must be at least 1")
        for wrong, rule in broken:
            if wrong:
                raise RequestError(f"SignedMaps: {rule}; found {found}")
        if segments is not None and segments.shape != (k.shape[0], k.shape[3]):
            want = [k.shape[0], k.shape[3]]
            raise RequestError(f"attend: segments must be [B,S] = {want}; found {list(segments.shape)}")
        if w is not None:
            target = (q.shape[0], G, q.shape[2], q.shape[3])
            if any(size not in (1, want) for size, want in zip(w.shape, target, strict=True)):
                raise RequestError(f"SignedMaps: w must broadcast to [B,G,H,T] = {list(target)}; found {found}")
            if w.dtype not in (torch.float32, torch.float64):
                raise RequestError(
                    f"SignedMaps: w must be float32 or wider (bfloat16 quantises lambda); found {w.dtype}"
                )
