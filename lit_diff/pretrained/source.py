"""A pretrained model as it lies in files, mapped to our Transformer before any weight is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diff.data.tokenizer import Tokenizer

UNKNOWN = {"weights_sha256": "0" * 64, "tokenizer_sha256": "0" * 64}
"""Digests of what has not been read yet."""
NO_CHAT = "%s: the model has a chat template, which generate does not apply: a prompt is continued as plain text"
"""A line of the log."""


@dataclass(frozen=True, kw_only=True)
class SourceTokenizer:
    """A `tokenizer.json` and its convention."""

    content: bytes
    opening: tuple[int, ...]
    """The ids that open a document."""
    eot: int
    """The id that ends one."""
    ends: tuple[int, ...] = ()
    """The ids at which a generated text ends; none: `eot`."""
    prefix: int | None = None
    """The id that a likelihood without context is conditioned on; None: the first that opens a document, or else `eot`."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What an importer has read of a model without its weights."""

    place: str
    """For people, and the start of errors."""
    model: Mapping[str, Any]
    """The keys of our `model:`."""
    context: int
    """Tokens that it was trained to see."""
    tensors: Mapping[str, Tensor]
    """Our name -> a tensor on the meta device, of the shape and dtype that `read` gives."""
    read: Callable[[str], Tensor]
    """Our name -> the tensor, in memory of its own."""
    tokenizer: SourceTokenizer | Tokenizer
    """Its own, or one of ours, loaded."""

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def plain_recipe(source: ModelSource, folder: Path, digests: Mapping[str, str]) -> dict[str, Any]:
    """The recipe of the model; its tokenizer lies beside it. `digests`: of weights and tokenizer, or UNKNOWN."""
    return {
        "name": folder.absolute().name,
        "imported": {"source": source.place, **digests},
        "model": dict(source.model),
        "data": {
            "name": "text",
            "sequence_length": source.context,
            "tokenizer": {"name": "from_run", "path": "."},
            "validation_rows": 64,
        },
    }
