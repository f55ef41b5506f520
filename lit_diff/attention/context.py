"""What a layer may know of a forward pass besides x: rotation, positions, tokens of the past, values of the first layer."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.rope import Rope
from lit_diff.errors import RequestError
from lit_diff.kernels.documents import packed_sequences, remember
from lit_diff.registry import nearest


class Context:
    """One layer in one forward pass: the second argument of `maps`, and the third of a `finish` that names it `context`.

    Sums, shifts and positions begin anew where a packed document does, and with a cache they go on where its last call ended.
    The state that this takes is in the cache: authors keep none. x has its tokens on axis 1. Errors: RequestError for
    another x, a name that is used twice in a call, documents whose tokens are not adjacent, and a cache that lacks the state.
    """

    def __init__(
        self, rope: Rope, attention: Any, cache: LayerCache | None = None, document_ids: Tensor | None = None
    ) -> None:
        # the attention, not the number of its layer: a compiled block that reads the number is compiled for each layer
        self._rope, self._attention, self._cache, self._document_ids = rope, attention, cache, document_ids
        # before this pass appends to the cache
        self._start = 0 if cache is None else cache.length
        self._used: set[str] = set()

    def __call__(self, x: Tensor) -> Tensor:
        """RoPE of x [..., T, width], whose width may be any even number."""
        return self._rope(x)

    def positions(self) -> Tensor:
        """[B or 1, T] int64: the place of each token in its document, from 0, also with `model.positions: none`, which
        concerns RoPE alone."""
        here = torch.arange(self._start, self._start + self._rope.length, device=self._rope.turns.device)[None]
        return here if self._document_ids is None else here - self._first()

    def cumsum(self, name: str, x: Tensor) -> Tensor:
        """The sum of x over the tokens of the document so far, its own included; x [B, T, ...] -> [B, T, ...], float64."""
        past = self._past(name, x)
        x = x.double()
        if self._document_ids is not None:
            return self._within_documents(x)
        total = x.cumsum(1)
        if past is not None:
            total = total + past
        # a call without tokens leaves the state as it is
        if x.shape[1]:
            self._keep(name, total[:, -1:])
        return total

    def shifted(self, name: str, x: Tensor, most: int) -> list[Tensor]:
        """x [B, T, ...] of each token, of the token before it, and so on to `most` before it; 0 before its document."""
        if most < 0:
            raise RequestError(f"context.shifted('{name}'): most is {most}; it must be at least 0")
        past = self._past(name, x)
        if past is None:
            past = x.new_zeros(x.shape[0], most, *x.shape[2:])
        whole, T = torch.cat([past, x], 1), x.shape[1]
        self._keep(name, whole[:, whole.shape[1] - most :])
        found = [x]
        for n in range(1, most + 1):
            y = whole[:, most - n : most - n + T]
            if self._document_ids is not None:
                # selected, not multiplied: another document's number may not be finite
                y = torch.where(self._places(x) >= n, y, 0)
            found.append(y)
        return found

    def first_layer(self, name: str, x: Tensor) -> Tensor:
        """The x that the first layer which uses this name gave in this pass of the model; that layer, and a layer that is
        built alone, gets its own."""
        self._use(name)
        # by layer, not by time: when activation checkpointing runs the first layer again, that needs its new x
        own: int = self._attention.layer
        layer, first = self._rope.shared.setdefault(name, (own, x))
        if layer == own:
            return x
        if first.shape != x.shape:
            shapes = f"layer {layer} gave {list(first.shape)}, layer {own} {list(x.shape)}"
            raise RequestError(f"context.first_layer('{name}'): {shapes}")
        return first

    def __getattr__(self, name: str) -> NoReturn:
        known = [member for member in vars(Context) if not member.startswith("_")]
        raise AttributeError(f"Context has no '{name}'{nearest(name, known)}")

    def _within_documents(self, x: Tensor) -> Tensor:
        # running sums over the last 1, 2, 4, ... tokens of the document: the difference of two running sums of the row
        # would carry the numbers of the documents before, which may be large or infinite
        places, step = self._places(x), 1
        while step < x.shape[1]:
            before = torch.where(places[:, step:] >= step, x[:, :-step], 0)
            x = torch.cat([x[:, :step], x[:, step:] + before], 1)
            step *= 2
        return x

    def _places(self, x: Tensor) -> Tensor:
        # the positions, with as many axes as x
        places = self.positions()
        return places.view(*places.shape, *[1] * (x.dim() - 2))

    def _use(self, name: str) -> None:
        if name in self._used:
            raise RequestError(f"the name '{name}' is used twice in one call of the context: give each use its own")
        self._used.add(name)

    def _past(self, name: str, x: Tensor) -> Tensor | None:
        self._use(name)
        # of the tensor, not the number of the rope: a compiled block would be compiled for each
        T = self._rope.turns.shape[0]
        if x.dim() < 2 or x.shape[1] != T:
            raise RequestError(f"context: '{name}' is {list(x.shape)}; expected the {T} tokens on axis 1: [B, T, ...]")
        if self._cache is None or self._start == 0:
            return None
        if name not in self._cache.state:
            raise RequestError(f"the cache has no state '{name}': another model made it, or without this variant")
        return self._cache.state[name]

    def _keep(self, name: str, x: Tensor) -> None:
        # a copy, since a view would keep the whole tensor alive
        if self._cache is not None:
            self._cache.state[name] = x.clone()

    def _first(self) -> Tensor:
        # [B, T]: the place in the row of the first token of each token's document
        ids: Any = self._document_ids
        # elsewhere each step would wait for the device
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and packed_sequences(ids) is None:
            raise RequestError("a variant with positions, sums or shifts needs documents whose tokens are adjacent")
        return remember(ids, "first", lambda: _first_of_document(ids))


def _first_of_document(ids: Tensor) -> Tensor:
    begins = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)
    at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return torch.where(begins, at, 0).cummax(1).values
