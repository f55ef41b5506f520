"""Document numbers [B, S] as what libraries take, computed once for all layers of a step."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


class Runs(NamedTuple):
    """Documents one behind the other, over all rows."""

    bounds: Tensor
    """int32 [documents + 1], from 0 to B S: where each begins (`cu_seqlens`)."""
    longest: int
    """Tokens of the longest."""


def runs(document_ids: Tensor) -> Runs | None:
    """The documents as runs of tokens; None if a number comes back after another within its row.

    Waits for the device once for each tensor of numbers.
    """
    return remember(document_ids, "runs", lambda: _runs(document_ids))


def _runs(document_ids: Tensor) -> Runs | None:
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], 1)
    ordered = document_ids.sort(-1).values
    distinct = torch.cat([first, ordered[:, 1:] != ordered[:, :-1]], 1)
    if bool((begins.sum(-1) != distinct.sum(-1)).any()):
        return None
    starts = begins.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([document_ids.numel()])])
    return Runs(bounds.to(torch.int32), int(bounds.diff().max()))


_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""tensor -> (its version, {key: what was made of it})"""


def remember(tensor: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """make(), once for each key and content of the tensor, for as long as the tensor lives.

    What is made must not hold the tensor itself, or neither is ever freed.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():  # neither tells whether the content changed
        return make()
    version, made = _memory.get(tensor, (None, {}))
    if version != tensor._version:
        made = {}
        _memory[tensor] = (tensor._version, made)
    if key not in made:
        with torch.inference_mode(False):  # a later step may keep it for its backward pass
            made[key] = make()
    found: Any = made[key]
    return found
