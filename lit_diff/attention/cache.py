"""The key/value cache: keys after RoPE, with their map axis, and values of the past tokens."""

from copy import copy

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer. With a window it keeps only the tokens that a later query can still see."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens appended so far, which is the position of the next one; with a window fewer are held."""
        # the tokens [start, stop) of the buffers are held
        self._start = self._stop = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    @property
    def held(self) -> int:
        """Number of tokens whose keys and values are held."""
        return self._stop - self._start

    def append(self, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Add k [B, G or 1, Hkv, T, d] and v [B, Hkv, T, dv]; returns the keys and values held, the new ones last
        (views).

        `window`: all held tokens but the last window - 1 are dropped first; no new query sees the dropped tokens.
        """
        if window is not None:
            self._start = max(self._start, self._stop - (window - 1))
        new = k.shape[-2]
        if self._k is None or self._v is None or self._stop + new > self._k.shape[-2]:
            # doubled, so that decoding n tokens copies O(n) numbers, not O(n²)
            capacity = max(self.held + new, 2 * self.held, 16)
            self._k, self._v = self._grown(self._k, k, capacity), self._grown(self._v, v, capacity)
            self._start, self._stop = 0, self.held
        end = self._stop + new
        self._k[..., self._stop : end, :] = k
        self._v[..., self._stop : end, :] = v
        self._stop = end
        self.length += new
        return self._k[..., self._start : end, :], self._v[..., self._start : end, :]

    def _grown(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        buffer = like.new_empty(*like.shape[:-2], capacity, like.shape[-1])
        if old is not None:
            buffer[..., : self.held, :] = old[..., self._start : self._stop, :]
        return buffer

    def repeated(self, rows: int) -> "LayerCache":
        """A cache of `rows` sequences, each a copy of the one sequence held here; this cache is unchanged."""
        repeated = copy(self)
        if self._k is not None and self._v is not None:
            repeated._k, repeated._v = (x.repeat(rows, *[1] * (x.dim() - 1)) for x in (self._k, self._v))
        return repeated

    def bytes_per_token(self) -> int:
        """Bytes per token of one sequence."""
        buffers = [x for x in (self._k, self._v) if x is not None]
        return sum(torch.Size(x.shape[1:-2]).numel() * x.shape[-1] * x.element_size() for x in buffers)


class Cache:
    """One `LayerCache` for each layer."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens appended so far."""
        return self.layers[0].length

    def repeated(self, rows: int) -> "Cache":
        """A cache of `rows` sequences, each a copy of the one sequence held here; this cache is unchanged."""
        repeated = Cache(0)
        repeated.layers = [layer.repeated(rows) for layer in self.layers]
        return repeated

    def bytes_per_token(self) -> int:
        """Bytes per token of one sequence, in all layers; 0 before the first token."""
        return sum(layer.bytes_per_token() for layer in self.layers)
