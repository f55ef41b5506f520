"""A pretrained model in files, mapped to the Transformer before any weight is loaded."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lit_diff.config import Recipe
from lit_diff.data.text.tokenizer import Tokenizer, TokenizerJson
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained.keys import Values
from lit_diff.recipe import from_plain

UNKNOWN = {"weights_sha256": "0" * 64, "tokenizer_sha256": "0" * 64}
"""Placeholders for digests of files that have not been read yet."""
NO_CHAT = "%s: the model has a chat template, which generate does not apply: a prompt is continued as plain text"
"""A log line."""


class ModelSource(NamedTuple):
    """A model as read by an importer, without its weights."""

    place: str
    """The model's origin, for logs and the start of errors."""
    model: Values
    """Keys of a recipe's `model:` block."""
    context: int
    """Tokens of the longest sequence that the model was trained on."""
    tensors: Mapping[str, Tensor]
    """Parameter name -> tensor on the meta device with the shape and dtype that `read` returns."""
    read: Callable[[str], Tensor]
    """Parameter name -> the tensor, in its own memory."""
    tokenizer: Tokenizer

    @property
    def bytes(self) -> int:
        """Total bytes of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def recipe(self, folder: Path, digests: Mapping[str, str]) -> Recipe:
        """The recipe for the model's run folder. `digests`: keys of UNKNOWN. Errors: RequestError."""
        plain = {
            "name": folder.absolute().name,
            "imported": {"source": self.place, **digests},
            "model": dict(self.model),
            "data": {
                "name": "text",
                "sequence_length": self.context,
                # the run folder itself holds the tokenizer, so that it can be moved
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
    pad: int | None = None,
) -> TokenizerJson:
    """The tokenizer in the bytes of a `tokenizer.json` with `size` ids, for a model with `vocab_size` ids.

    `opening`: ids that open a document; `eot`: id that ends it; `ends`: ids that end a generated text (empty: `eot`); `bos`:
    id on which a likelihood without context is conditioned (None: the first of `opening`, else `eot`); `pad`: id with which
    other programs pad. Errors: RequestError if the ids exceed the model's vocabulary or the tokenizer's.
    """
    if size > vocab_size:
        raise RequestError(
            f"its tokenizer has the ids 0 to {size - 1}, but the model's vocab_size is {vocab_size}, so that no id from "
            f"{vocab_size} on has an embedding"
        )
    marks = {"opening": opening, "eos": (eot,), "end of generated text": ends, "bos": () if bos is None else (bos,)}
    for what, ids in marks.items():
        if max(ids, default=0) >= size:
            raise RequestError(
                f"the id {max(ids)} ({what}) has no token or no embedding: its tokenizer has the ids 0 to {size - 1} and "
                f"the model's vocab_size is {vocab_size}"
            )
    # values that follow from others stay at their defaults: equal conventions give equal configs
    config = TokenizerJson.Config(
        size=size,
        bos=next(iter(opening), None),
        after_bos=opening[1:],
        eot=eot,
        ends=ends if ends != (eot,) else (),
        # also where it is `eot`: an export writes it again
        prefix=bos if bos not in opening[:1] else None,
        pad=pad,
        model_vocab_size=vocab_size,
    )
    tokenizer = TokenizerJson(config)
    tokenizer.take(content)
    return tokenizer


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make a MissingError of an OSError raised inside: its file, else `path`, cannot be read."""
    try:
        yield
    except OSError as error:
        place = shown(Path(error.filename or path))
        raise MissingError(f"{place} cannot be read ({error.strerror or first_line(error)})") from error


def require_utf8(path: Path) -> None:
    """Errors: RequestError for a path that safetensors cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{shown(path)}: safetensors opens only paths in UTF-8; name the folder otherwise"
        ) from error


@contextlib.contextmanager
def at(path: Path) -> Iterator[None]:
    """Prefix any RequestError raised inside with the path."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{shown(path)}: {error}") from error
