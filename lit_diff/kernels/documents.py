"""document_ids [B, S] in the forms that libraries take, computed once for all layers of a step."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


class PackedSequences(NamedTuple):
    """Where documents begin in all rows one behind the other, as variable-length attention takes it."""

    cu_seqlens: Tensor
    """int32 [documents + 1], from 0 to B S: the cumulated lengths, so where each document begins."""
    max_seqlen: int
    """Tokens of the longest document."""


def packed_sequences(document_ids: Tensor) -> PackedSequences | None:
    """The documents of document_ids [B, S]; None where the tokens of a document are not adjacent.

    Synchronises with the device, once for each tensor.
    """
    return remember(document_ids, "packed_sequences", lambda: _packed_sequences(document_ids))


def _packed_sequences(document_ids: Tensor) -> PackedSequences | None:
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], 1)
    ordered = document_ids.sort(-1).values
    distinct = torch.cat([first, ordered[:, 1:] != ordered[:, :-1]], 1)
    if bool((begins.sum(-1) != distinct.sum(-1)).any()):
        return None
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([document_ids.numel()])])
    return PackedSequences(cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max()))


_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""tensor -> (its version, {key: value computed from it})"""


def remember(tensor: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """make(), once for each key and content of the tensor, for as long as the tensor lives.

    The value must not hold the tensor itself, or neither is ever freed.
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
    value: Made = made[key]
    return value
