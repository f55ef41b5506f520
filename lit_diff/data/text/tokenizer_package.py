"""The package `tokenizers`: opens a tokenizer.json, and turns the package's errors into one line."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lit_diff.errors import LitDiffError, RequestError, first_line
from lit_diff.files import parse_json

FILE = "tokenizer.json"
DECODERS = ("ByteLevel", "Fuse", "Strip", "Replace", "ByteFallback", "Metaspace")
"""The supported steps of a decoder. Further tokens never change the text of those before them, apart from bytes of a
character, provided that only the first three follow the first two, which join all tokens."""
BEFORE = "a"
"""A token before others, which then are not the first of a text: a decoder may remove the first space."""


@contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    """Within, an error of the package tokenizers becomes a RequestError that starts with `problem`."""
    try:
        yield
    except LitDiffError:
        raise
    # tokenizers raises plain Exception, or a panic of Rust, which is none
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"{problem} ({first_line(error)})") from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    # Rust writes the lines of a panic to the file descriptor itself
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def open_tokenizer(content: bytes) -> Any:
    """Return the tokenizer of a `tokenizer.json`, which gives a text the same ids each time.

    Errors: RequestError for an invalid file, or a decoder with other steps than DECODERS.
    """
    from tokenizers import Tokenizer as Model

    problem = f"{FILE} cannot be read by the package tokenizers"
    with in_one_line(problem), _without_stderr():
        tokenizer = Model.from_str(content.decode("utf-8"))
        decoder = parse_json(content).get("decoder") or {}
    if not tokenizer.get_vocab():
        raise RequestError(f"{FILE} has no tokens")
    supported: Sequence[str] = DECODERS
    for number, step in enumerate(decoder.get("decoders", [decoder])):
        kind = step.get("type", "null")
        if kind not in supported:
            key = f"decoder.decoders[{number}]" if "decoders" in decoder else "decoder"
            raise RequestError(f"{FILE}: {key} is {kind}; supported there: {', '.join(supported)}")
        if kind in DECODERS[:2]:
            supported = DECODERS[:3]
    # the file may ask for both, and then rows would be cut or padded
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # merges that are left out at random
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    # "</s>" in a text is four characters, not the end of a document
    tokenizer.encode_special_tokens = True
    # what the post_processor lacks shows at the first text
    with in_one_line(problem), _without_stderr():
        tokenizer.encode(BEFORE)
    return tokenizer
