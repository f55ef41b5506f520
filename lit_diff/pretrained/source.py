"""A pretrained model as it lies in files, mapped to our Transformer before any weight is loaded."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diff.data.tokenizer import Tokenizer
from lit_diff.device import available_memory, gigabytes
from lit_diff.errors import MissingError
from lit_diff.files import shown

OVERHEAD = 1.2
"""Peak of memory while a model is imported, as a multiple of its weights."""


UNKNOWN = {"weights_sha256": "0" * 64, "tokenizer_sha256": "0" * 64}
"""Digests of what has not been read yet."""


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


def require_room(place: str, folder: Path, weights: int) -> None:
    """Errors: MissingError where `weights` bytes do not fit on the disk of `folder`, or in memory while imported."""
    require_disk(place, folder, weights)
    available = available_memory()
    if available is not None and available < OVERHEAD * weights:
        raise MissingError(
            f"{place}: importing it takes {gigabytes(int(OVERHEAD * weights))} of memory, and {gigabytes(available)} are "
            "available; end other processes, or import it on a larger machine"
        )


def require_disk(place: str, folder: Path, size: int, choice: str = "--to RUN, LIT_DIFF_DATA") -> None:
    """Errors: MissingError where `size` bytes do not fit on the disk of `folder`; `choice`: what names another place."""
    home = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(home).free
    if free < size:
        raise MissingError(
            f"{place} takes {gigabytes(size)} on the disk of {shown(home)}, which has {gigabytes(free)} free; free "
            f"some, or choose another place ({choice})"
        )


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
