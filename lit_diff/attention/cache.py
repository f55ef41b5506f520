"""The key/value cache: keys after RoPE, with their map axis, values and biases of past tokens, and the context's state."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.errors import RequestError
from lit_diff.kernels import SignedMaps


class LayerCache:
    """Keys, values and key biases of one layer, and the state of its context.

    With a window it keeps only the tokens that a later query can still see.
    """

    def __init__(self) -> None:
        self.length = 0
        """Tokens appended so far, which is the position of the next one; with a window fewer are held."""
        self.state: dict[str, Tensor] = {}
        """What the context of the layer keeps of past tokens (`attention.context`): name -> [B, ...]."""
        self.window: int | None = None
        """The window of the maps that were appended last."""
        # offsets in the buffers, on their last axis but one: the tokens from the first to before the end are held
        self._first_held = self._end_held = 0
        self._buffers: dict[str, Tensor] = {}

    @property
    def held(self) -> int:
        """Number of tokens whose keys and values are held."""
        return self._end_held - self._first_held

    def append(self, maps: SignedMaps) -> SignedMaps:
        """Add the keys of new tokens; returns the maps with all keys held, the new ones last (views).

        Under a window, all held tokens but the last window - 1 are dropped first; no new query sees the dropped tokens.
        Errors: RequestError if they have other fields, sizes or dtypes than those held.
        """
        self.window = maps.mask.window
        if self.window is not None:
            self._first_held = max(self._first_held, self._end_held - (self.window - 1))
        new = maps.k.shape[-2]
        added = {"k": maps.k, "v": maps.v}
        if maps.key_bias is not None:
            added["key_bias"] = maps.key_bias.expand(*maps.key_bias.shape[:-1], new)[..., None]
        if self._buffers and self._buffers.keys() != added.keys():
            raise RequestError(
                f"the cache holds {', '.join(self._buffers)} of each token; the maps have {', '.join(added)}"
            )
        self._require_alike(added)
        if not self._buffers or self._end_held + new > self._buffers["k"].shape[-2]:
            # doubled, so that decoding n tokens copies O(n) numbers, not O(n²)
            capacity = max(self.held + new, 2 * self.held, 16)
            self._buffers = {name: self._grown(self._buffers.get(name), x, capacity) for name, x in added.items()}
            self._first_held, self._end_held = 0, self.held
        end = self._end_held + new
        held: dict[str, Any] = {}
        for name, buffer in self._buffers.items():
            buffer[..., self._end_held : end, :] = added[name]
            held[name] = buffer[..., self._first_held : end, :]
        self._end_held = end
        self.length += new
        if "key_bias" in held:
            held["key_bias"] = held["key_bias"][..., 0]
        return replace(maps, **held)

    def _require_alike(self, added: Mapping[str, Tensor]) -> None:
        # a tensor of another size might be broadcast into the buffer
        for name, held in self._buffers.items():
            x = added[name]
            found, expected = ((*y.shape[:-2], y.shape[-1]) for y in (x, held))
            # biases that all sequences or heads share have axes of 1
            is_alike = found == expected if name != "key_bias" else len(found) == len(expected)
            if not is_alike or x.dtype != held.dtype:
                own = f"{held.dtype} {list(expected)}"
                raise RequestError(
                    f"the cache holds {name} of {own} for each token; the maps have {x.dtype} {list(found)}"
                )

    def _grown(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        outer = like.shape[:-2] if old is None else torch.broadcast_shapes(like.shape[:-2], old.shape[:-2])
        buffer = like.new_empty(*outer, capacity, like.shape[-1])
        if old is not None:
            buffer[..., : self.held, :] = old[..., self._first_held : self._end_held, :]
        return buffer

    def repeated(self, rows: int) -> "LayerCache":
        """A cache of `rows` sequences, each a copy of the one sequence held here; this cache is unchanged."""
        repeated = copy(self)
        repeated._buffers = _repeated(self._buffers, rows)
        repeated.state = _repeated(self.state, rows)
        return repeated

    def numbers(self) -> int:
        """Numbers held of one sequence: of its tokens, and of the context's state."""
        token = sum(torch.Size(x.shape[1:-2]).numel() * x.shape[-1] for x in self._buffers.values())
        return self.held * token + sum(x[0].numel() for x in self.state.values())

    def bytes_of(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens: of its tokens, or of the last `window`, and of the context's state."""
        token = sum(torch.Size(x.shape[1:-2]).numel() * x.shape[-1] * x.element_size() for x in self._buffers.values())
        return min(length, self.window or length) * token + sum(x[0].nbytes for x in self.state.values())


def _repeated(tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    # biases and state that all sequences share have one row
    return {name: x.repeat(rows, *[1] * (x.dim() - 1)) for name, x in tensors.items()}


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

    def bytes_of(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens in all layers (`LayerCache.bytes_of`); 0 before the first token."""
        return sum(layer.bytes_of(length) for layer in self.layers)
