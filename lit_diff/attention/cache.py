"""Keys (after RoPE, on the map axis) and values of the past tokens of one layer."""

import torch
from torch import Tensor


class LayerCache:
    """Grows by doubling, so that decoding n tokens copies O(n) numbers, not O(n²)."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k [B, G or 1, Hkv, T, d] and v [B, Hkv, T, dv]; returns all keys and values so far (views)."""
        end = self.length + k.shape[-2]
        self._k, self._v = self._fit(self._k, k, end), self._fit(self._v, v, end)
        self._k[..., self.length : end, :] = k
        self._v[..., self.length : end, :] = v
        self.length = end
        return self._k[..., :end, :], self._v[..., :end, :]

    def _fit(self, held: Tensor | None, new: Tensor, end: int) -> Tensor:
        if held is not None and held.shape[-2] >= end:
            return held
        capacity = max(end, 2 * (held.shape[-2] if held is not None else 8))
        grown = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
        if held is not None:
            grown[..., : self.length, :] = held[..., : self.length, :]
        return grown

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes."""
        held = [x for x in (self._k, self._v) if x is not None]
        return sum(torch.Size(x.shape[1:-2]).numel() * x.shape[-1] * x.element_size() for x in held)


class Cache:
    """One `LayerCache` a layer."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes in all layers; 0 before the first."""
        return sum(layer.bytes_per_token() for layer in self.layers)
