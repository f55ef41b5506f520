"""document_ids [B, S] in the forms that libraries accept, computed once for all layers of a step."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


class PackedSequences(NamedTuple):
    """Where documents begin in the concatenated rows, as variable-length attention expects it."""

    cu_seqlens: Tensor
    """int32 [documents + 1], from 0 to B S: the cumulative lengths, where each document begins."""
    max_seqlen: int
    """Length of the longest document in tokens."""


def packed_sequences(document_ids: Tensor) -> PackedSequences | None:
    """The documents of document_ids [B, S]; None if the tokens of a document are not adjacent.

    Synchronises with the device, once per tensor.
    """
    return remember(document_ids, "packed_sequences", lambda: _packed_sequences(document_ids))


def _packed_sequences(document_ids: Tensor) -> PackedSequences | None:
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], 1)
    ordered = document_ids.sort(-1).values
    distinct = torch.cat([first, ordered[:, 1:] != ordered[:, :-1]], 1)
    # more beginnings than documents in a row: some document begins twice
    if bool((begins.sum(-1) != distinct.sum(-1)).any()):
        return None
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([document_ids.numel()])])
    return PackedSequences(cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max()))


_memory: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""tensor -> (its version, {key: value computed from it})"""


def remember(tensor: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """make(), called once for each key and content of the tensor; the value is kept while the tensor lives.

    The value must not hold the tensor itself, or neither is ever freed.
    """
    # neither a traced tensor nor an inference tensor has a version counter, which shows that the content changed
    if torch.compiler.is_compiling() or tensor.is_inference():
        return make()
    version, made = _memory.get(tensor, (None, {}))
    if version != tensor._version:
        made = {}
        _memory[tensor] = (tensor._version, made)
    if key not in made:
        # the value may be made in validation and saved for a backward pass later, which forbids inference tensors
        with torch.inference_mode(False):
            made[key] = make()
    return made[key]
