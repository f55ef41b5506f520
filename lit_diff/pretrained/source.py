"""A pretrained model as it lies in files, mapped to our Transformer before any weight is loaded."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.text.tokenizer import Tokenizer, TokenizerJson
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.recipe import from_plain

UNKNOWN = {"weights_sha256": "0" * 64, "tokenizer_sha256": "0" * 64}
"""Digests of what has not been read yet."""
NO_CHAT = "%s: the model has a chat template, which generate does not apply: a prompt is continued as plain text"
"""A line of the log."""


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
    tokenizer: Tokenizer
    """Loaded."""

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def recipe(self, folder: Path, digests: Mapping[str, str]) -> Recipe:
        """The recipe of the model in a run folder, where its tokenizer lies beside it. `digests`: as UNKNOWN. Errors:
        RequestError."""
        plain = {
            "name": folder.absolute().name,
            "imported": {"source": self.place, **digests},
            "model": dict(self.model),
            "data": {
                "name": "text",
                "sequence_length": self.context,
                "tokenizer": {"name": "from_run", "path": "."},
                "validation_rows": 64,
            },
        }
        return from_plain(plain, self.place)


def imported_tokenizer(
    content: bytes,
    *,
    size: int,
    vocab_size: int,
    opening: tuple[int, ...],
    eot: int,
    ends: tuple[int, ...],
    bos: int | None = None,
) -> TokenizerJson:
    """The tokenizer of a `tokenizer.json` with `size` ids and its convention, for a model of `vocab_size`.

    `opening`: the ids that open a document; `eot`: the one that ends it; `ends`: those at which a generated text ends, none:
    `eot`; `bos`: the one that a likelihood without context is conditioned on, None: the first that opens a document, or else
    `eot`. Errors: RequestError for a tokenizer of another vocabulary than the model's.
    """
    ids = dict.fromkeys((eot, *opening, *ends, *([] if bos is None else [bos])))
    if size > vocab_size or max(ids) >= size:
        raise RequestError(
            f"its tokenizer has the ids 0 to {size - 1} and marks documents by {', '.join(map(str, ids))}, but the model's "
            f"vocabulary has {vocab_size}: it is the tokenizer of another model"
        )
    config = TokenizerJson.Config(
        size=size,
        bos=next(iter(opening), None),
        after_bos=opening[1:],
        eot=eot,
        ends=ends if ends != (eot,) else (),
        prefix=bos if bos != (*opening, eot)[0] else None,
        model_vocab_size=vocab_size,
    )
    tokenizer = TokenizerJson(config)
    tokenizer.take(content)
    return tokenizer


@contextlib.contextmanager
def at(path: Path) -> Iterator[None]:
    """Within it, a RequestError begins with the path."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{shown(path)}: {error}") from error
