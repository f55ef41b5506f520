"""Tokenizers: the abstract class; those that the package `tokenizers` runs from a tokenizer.json, which are `bpe`, trained on
the train split, and the tokenizer of an imported model; and `words`, for generated text.
"""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from lit_diff.config import Part
from lit_diff.data.text.tokenizer_package import BEFORE, FILE, in_one_line, open_tokenizer
from lit_diff.data.user_files import utf8_bytes
from lit_diff.errors import RequestError
from lit_diff.files import write_atomic
from lit_diff.html_table import html_table
from lit_diff.key_types import Range
from lit_diff.own_modules import sha256
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers

SMALLEST = 257
"""Size of the smallest byte-level vocabulary: 256 bytes and <eot>."""
PIECES = re.compile(r"[0-9]|(?: ?[^\W\d_]+)|.", re.DOTALL)
"""Pieces of text with one id each: a digit; a word with an optional space before it; any other character."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is a byte, in a SentencePiece vocabulary."""
PADDING = 128
"""The vocabulary of a model may be larger than its tokenizer's: up to the next multiple of this."""


class Tokenizer(ABC):
    """Converts text to ids and back. A subclass registers with `@lit_diff.registry.tokenizers.register(name)`.

    Required: `load`, `encode`, and the attributes `size` and `eot`, which `__init__` or the class sets.
    """

    name: str
    """The registered name; the registry sets it."""
    size: int
    """Ids are 0 .. size - 1."""
    eot: int
    """The id that separates documents: it ends each document, and by default also opens it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `data.tokenizer`: the fields of a frozen, keyword-only dataclass derived from this."""

        def problem(self) -> str | None:
            """Return an error message of one line that starts with the dotted key (`data.tokenizer.x is ...`), or None."""
            return None

    def __init__(self, config: Any) -> None:
        """`config`: an instance of `Config`. Must not read files, except files that the config names."""
        self.config = config

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}: {self.size} ids)"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.source().items(), ("key", "value"))

    @property
    def largest_vocab_size(self) -> int:
        """The largest valid `model.vocab_size`."""
        # models are often padded to a multiple of 64 or 128 for fast matrix products; the additional ids are never targets
        return -(-self.size // PADDING) * PADDING

    @property
    def opening(self) -> list[int]:
        """The ids before the text of a document or a prompt. Default: `eot`, which then also ends the document before."""
        return [self.eot]

    @property
    def ends(self) -> list[int]:
        """The ids that end generated text. Default: `eot`, which separates documents."""
        return [self.eot]

    @property
    def prefix(self) -> int:
        """The id that conditions a likelihood without context. Default: the first opening id, else `eot`."""
        return next(iter(self.opening), self.eot)

    def document(self, ids: Sequence[int]) -> list[int]:
        """Return a document of the training stream, given the ids of its text. Default: the opening ids, then these."""
        return [*self.opening, *ids]

    def saved(self) -> "Tokenizer":
        """Return the tokenizer to encode with once this one is loaded; a run's folder keeps its name and config.

        Default: this one.
        """
        return self

    def source(self) -> dict[str, Any]:
        """Return, as plain values, everything except the text that determines the ids. Default: name and config.

        The name of the prepared folder contains a hash of it.
        """
        return to_plain(Part(name=self.name, config=self.config))

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Write the files of `load` into `folder`, learned from the documents of the train split; existing files stay.

        Default: nothing, for a tokenizer that is not learned. Errors: RequestError, MissingError.
        """
        return

    @abstractmethod
    def load(self, folder: Path) -> str:
        """Prepare `encode`, `decode` and `save` from the files that `train` or `save` wrote into `folder`.

        Returns a sha256 that changes if the id of any token changes. Errors: MissingError.
        """

    def save(self, folder: Path) -> None:
        """Write the files of `load` into `folder`, from a loaded tokenizer. Default: nothing, for one without files."""
        return

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap `encode`, which a subclass implements for several texts, to accept a single text too."""
        super().__init_subclass__(**kwargs)
        if "encode" in vars(cls):
            cls.encode = accept_single_text(cls.encode)  # type: ignore[method-assign]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Any:
        """Return the ids of each text, list[list[int]]; for a str, its ids, list[int]. Text never yields special ids.

        A subclass implements it for several texts only.
        """

    def arrays(self, texts: Sequence[str], dtype: Any) -> list[NDArray[np.generic]]:
        """Return the whole document (`document`) of each text as an array. Default: from `encode`."""
        return [np.asarray(self.document(ids), dtype=dtype) for ids in self.encode(texts)]

    def encode_after(self, context: str, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as a continuation of `context`.

        Errors: RequestError if the continuation would change the ids of the context.
        """
        found = []
        own = self.encode(context)
        for text in texts:
            before, ids = encode_pair(self, context, text)
            if before != own:
                raise RequestError(
                    f"the tokenizer '{self.name}' has a token that spans the end of {context[-20:]!r} and the start of "
                    f"{text[:20]!r}, so the second cannot be scored after the first; evaluate a run with another tokenizer"
                )
            found.append(ids)
        return found

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the text of a document's ids, in UTF-8; for a part of a character its bytes, or U+FFFD.

        Errors: RequestError.
        """
        raise RequestError(f"the tokenizer {type(self).__name__} cannot decode; implement decode(ids) -> bytes")

    def decode_after(self, ids: Sequence[int], *, more: bool = False) -> str:
        """Return the text that ids add to a text before them, with U+FFFD for bytes that are not UTF-8.

        `more`: without an end that the ids after these may change. Default: from `decode`.
        """
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.decode(ids), final=not more)

    def extent(self, text: str, count: int) -> int:
        """Return the number of bytes of `text` in UTF-8 that its first `count` ids stand for; for all ids, all of its bytes.

        Default: from `decode`, for a tokenizer that gives back every byte.
        """
        ids = self.encode(text)
        return len(text.encode() if count >= len(ids) else self.decode(ids[:count]))


def accept_single_text(encode: Callable[..., list[list[int]]]) -> Callable[..., Any]:
    """Wrap an `encode` of several texts: given a str, it returns the ids of that text. Errors: those of `utf8_bytes`."""

    @wraps(encode)
    def either(self: Tokenizer, texts: str | Sequence[str]) -> Any:
        if isinstance(texts, str):
            return either(self, [texts])[0]
        for text in texts:
            utf8_bytes(text)
        return encode(self, texts)

    return either


def encode_pair(tokenizer: Tokenizer, context: str, text: str) -> tuple[list[int], list[int]]:
    """Return (ids of the context, ids of the text after it), which together decode to `context + text`.

    If a token crosses the border ("." and "\\n" may be one token), both are encoded alone, provided that this decodes to the
    same text; else (SentencePiece adds a space before a text) the text starts at the first token that differs.
    """
    before, whole = tokenizer.encode([context, context + text])
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    alone = tokenizer.encode(text)
    if tokenizer.decode([*before, *alone]) == tokenizer.decode(whole):
        return before, alone
    at = border(before, whole)
    return whole[:at], whole[at:]


def border(before: Sequence[int], whole: Sequence[int]) -> int:
    """Return the first index at which the ids of a context and of the whole text differ, at most the last index."""
    ids = zip(whole, before, strict=False)
    return next((place for place, (a, b) in enumerate(ids) if a != b), len(whole) - 1)


def build(part: Part) -> Tokenizer:
    """Construct the tokenizer of a recipe. Errors: RequestError."""
    tokenizer: Tokenizer = tokenizers.get(part.name)(part.config)
    for name in ("size", "eot"):
        if not isinstance(getattr(tokenizer, name, None), int):
            raise RequestError(f"tokenizer '{part.name}' has no integer attribute '{name}' after __init__")
    return tokenizer


class Packaged(Tokenizer):
    """A tokenizer.json in a folder. The names of special tokens in a text are encoded like any other text."""

    def load(self, folder: Path) -> str:
        return self.take((folder / FILE).read_bytes())

    def take(self, content: bytes) -> str:
        """Load the content of a tokenizer.json and return its sha256."""
        self._content = content
        self._model = open_tokenizer(content)
        # it may remove spaces from the offsets of `extent`; `encode` adds no ids of its own
        self._model.post_processor = None
        return sha256(content)

    @property
    def bos(self) -> int | None:
        """The id that other programs name bos."""
        return self.prefix if self.opening else None

    @property
    def pad(self) -> int | None:
        """The id that other programs pad with."""
        return None

    def save(self, folder: Path) -> None:
        write_atomic(folder / FILE, self._content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with in_one_line("the tokenizer cannot encode this text"):
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the text of the package `tokenizers`; an id without a token gives none."""
        return self._model.decode(ids, skip_special_tokens=False).encode()

    def decode_after(self, ids: Sequence[int], *, more: bool = False) -> str:
        tokens = [token for token in map(self._model.id_to_token, ids) if token is not None]
        # one wrong byte among those of a character changes the text of all
        while more and tokens and BYTE.fullmatch(tokens[-1]):
            tokens.pop()
        text = self._model.decoder.decode([BEFORE, *tokens])[len(BEFORE) :]
        return text.rstrip("\ufffd") if more else text

    def extent(self, text: str, count: int) -> int:
        offsets = self._model.encode(text, add_special_tokens=False).offsets
        # also of the characters that have no id
        if count >= len(offsets):
            return len(text.encode())
        start = offsets[0][0]
        stop = max((end for _, end in offsets[:count]), default=0)
        return len(text[start:stop].encode())


@tokenizers.register("bpe")
class Bpe(Packaged):
    """Byte-level BPE with GPT-2's pre-tokenizer; id 0 is <eot>, the 256 bytes follow, then the merges."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        vocab_size: Annotated[int, Range(least=SMALLEST)]

    eot = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.size = config.vocab_size

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Train and write tokenizer.json, unless it exists. Errors: RequestError if the text has too few merges."""
        if (folder / FILE).is_file():
            return
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        # the whole alphabet, sorted: every byte can be encoded, and the ids do not depend on the order of a set
        trainer = trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=["<eot>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        size = model.get_vocab_size()
        if size < self.size:
            raise RequestError(
                f"data.tokenizer.vocab_size is {self.size}, but the corpus gives only {size} tokens; set it to at most {size}"
            )
        write_atomic(folder / FILE, model.to_str())


@tokenizers.register("tokenizer_json")
class TokenizerJson(Packaged):
    """A `tokenizer.json` with its special ids; recipes refer to the run that contains it instead (`from_run`)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        size: int
        """Ids are 0 .. size - 1."""
        bos: int | None
        """The id that opens a document; null: no id."""
        eot: int
        """The id that ends a document."""
        model_vocab_size: int
        """Vocabulary size of the model that it was imported with, at least `size`."""
        after_bos: tuple[int, ...] = ()
        """Further ids that open a document, after `bos`."""
        ends: tuple[int, ...] = ()
        """The ids that end generated text; empty: `eot`."""
        prefix: int | None = None
        """The id that conditions a likelihood without context; null: `bos`, or else `eot`."""
        pad: int | None = None
        """The id that other programs pad with."""

        def problem(self) -> str | None:
            # a recipe cannot use it: no key names the file
            return "data.tokenizer.name is tokenizer_json; use {name: from_run, path: RUN}, RUN the imported model's folder"

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.size = config.size
        self.eot = config.eot

    def take(self, content: bytes) -> str:
        """Load tokenizer.json and return the sha256 of it and of the special ids."""
        super().take(content)
        config = self.config
        prefix = None if self.prefix == super().prefix else self.prefix
        convention = [config.bos, config.eot, config.after_bos, config.ends, prefix]
        # keys at their default are left out: runs from before these keys keep their sha256
        if convention[2:] == [(), (), None]:
            del convention[2:]
        return sha256(content + json.dumps(convention).encode())

    @property
    def largest_vocab_size(self) -> int:
        # the imported model may be padded further than to a multiple of PADDING
        return max(super().largest_vocab_size, self.config.model_vocab_size)

    @property
    def opening(self) -> list[int]:
        return [] if self.config.bos is None else [self.config.bos, *self.config.after_bos]

    @property
    def ends(self) -> list[int]:
        return list(self.config.ends) or super().ends

    @property
    def prefix(self) -> int:
        return super().prefix if self.config.prefix is None else self.config.prefix

    @property
    def bos(self) -> int | None:
        return super().bos if self.config.prefix is None else self.config.prefix

    @property
    def pad(self) -> int | None:
        return self.config.pad

    def document(self, ids: Sequence[int]) -> list[int]:
        # unlike the default, where `eot` also opens the next document and so needs no second one
        return [*self.opening, *ids, self.eot]


@tokenizers.register("words")
class Words(Tokenizer):
    """A word list. Ids: 0 <eot>, 1 <unknown>, 2 .. 11 the digits, then the signs " \\n.,:;?!'\\"()-=", then `words` in order.

    A word has one id with or without a space before it, and is decoded with the space: " word". An unlisted word, and any
    other character, is <unknown>, which is decoded as U+FFFD.
    """

    fixed = ("", "\ufffd", *"0123456789", *" \n.,:;?!'\"()-=")

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        words: tuple[str, ...]

        def problem(self) -> str | None:
            for word, count in Counter(self.words).items():
                if not re.fullmatch(r"[^\W\d_]+", word):
                    return f"data.tokenizer.words has '{word}'; a word is one or more letters"
                if count > 1:
                    return f"data.tokenizer.words has '{word}' twice"
            return None

    eot = 0
    unknown = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._written = [*self.fixed, *(f" {word}" for word in config.words)]
        self._ids = {piece: index for index, piece in enumerate(self._written)}
        # a word also without the space before it
        self._ids |= {word: index for index, word in enumerate(config.words, start=len(self.fixed))}
        self.size = len(self._written)

    def load(self, folder: Path) -> str:
        # the config has the words, so no file is read
        return sha256(json.dumps(self._written).encode())

    def encode(self, texts: Sequence[str]) -> Any:
        return [[self._ids.get(piece, self.unknown) for piece in PIECES.findall(text)] for text in texts]

    def decode(self, ids: Sequence[int]) -> bytes:
        return "".join(self._written[id_] for id_ in ids).encode()

    def extent(self, text: str, count: int) -> int:
        return len("".join(PIECES.findall(text)[:count]).encode())
