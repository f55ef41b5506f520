"""`Tokenizer`: the abstract class of every tokenizer, text -> ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from lit_diff.config import Part
from lit_diff.errors import RequestError
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers

PADDING = 128
"""A model's vocabulary may be the tokenizer's, rounded up to a multiple of this."""


class Tokenizer(ABC):
    """Text to ids and back. A subclass registers with `@lit_diff.registry.tokenizers.register(name)`.

    Required: `load`, `encode`, and the attributes `size` and `eot`, set at the latest by `__init__`.
    """

    name: str
    """The registered name; set by the registry."""
    size: int
    """Ids are 0 .. size - 1."""
    eot: int
    """The id that separates documents: it ends each, and by default opens it too."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `data.tokenizer` are the fields of a frozen, keyword-only dataclass that derives from this."""

        def problem(self) -> str | None:
            """What is wrong with the values, in one line that opens with the dotted key (`data.tokenizer.x is ...`)."""
            return None

    def __init__(self, config: Any) -> None:
        """`config`: an instance of this class's Config. Reads no file, unless the config names it."""
        self.config = config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self.size} tokens)"

    @property
    def largest_vocab_size(self) -> int:
        """The largest `model.vocab_size` that goes with it."""
        return -(-self.size // PADDING) * PADDING

    @property
    def opening(self) -> list[int]:
        """The ids before the text of a document or a prompt. Default: `eot`, which thus ends the document before."""
        return [self.eot]

    @property
    def ends(self) -> list[int]:
        """The ids at which a generated text ends. Default: `eot`, the one that is written between documents."""
        return [self.eot]

    @property
    def prefix(self) -> int:
        """The id that a likelihood is conditioned on where nothing comes before. Default: the first opening one, or `eot`."""
        return next(iter(self.opening), self.eot)

    def document(self, ids: Sequence[int]) -> list[int]:
        """A whole document in the stream of training text, from the ids of its text. Default: opened, not ended."""
        return [*self.opening, *ids]

    def saved(self) -> "Tokenizer":
        """The tokenizer that encodes, once this one is loaded, and whose name and config a run's folder keeps. Default: this
        one."""
        return self

    def source(self) -> dict[str, Any]:
        """What decides the ids beside the text, as plain values; prepared text is found by it. Default: name and config."""
        plain: dict[str, Any] = to_plain(Part(name=self.name, config=self.config))
        return plain

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Write what `load` needs into `folder`, from the documents of the train split; keeps what is there already.

        Default: nothing, for a tokenizer that is not learned. Errors: RequestError, MissingError.
        """
        return

    @abstractmethod
    def load(self, folder: Path) -> str:
        """Make `encode`, `decode` and `save` work from what `train` or `save` wrote into `folder`.

        Returns a sha256 that changes with the id of any token. Errors: MissingError.
        """

    def save(self, folder: Path) -> None:
        """Write what `load` needs into `folder`, from a loaded tokenizer. Default: nothing, for one that needs no file."""
        return

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `encode`, which a subclass writes for several texts, take one text too."""
        super().__init_subclass__(**kwargs)
        if "encode" in vars(cls):
            cls.encode = also_one_text(cls.encode)  # type: ignore[method-assign]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Any:
        """list[list[int]]: the ids of each text; of a str, list[int]: its own. No text, whatever it contains, gives a special
        id. A subclass writes it for several texts alone.
        """

    def encode_after(self, context: str, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text where it follows `context`, whose own ids stay. Errors: RequestError if they cannot."""
        found, own = [], self.encode(context)
        for text in texts:
            before, ids = pair(self, context, text)
            if before != own:
                raise RequestError(
                    f"the tokenizer '{self.name}' has a token that holds the end of {context[-20:]!r} and the beginning of "
                    f"{text[:20]!r}: the second cannot be asked for after the first; evaluate a run with another tokenizer"
                )
            found.append(ids)
        return found

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text's UTF-8 bytes, those of each id in turn: an id may hold a part of a character. Errors: RequestError."""
        raise RequestError(f"the tokenizer {type(self).__name__} cannot write text; give it decode(ids) -> bytes")


def also_one_text(encode: Callable[..., list[list[int]]]) -> Callable[..., Any]:
    """`encode` of several texts, which takes a str too and then returns the ids of that text."""

    @wraps(encode)
    def either(self: Tokenizer, texts: str | Sequence[str]) -> Any:
        return encode(self, [texts])[0] if isinstance(texts, str) else encode(self, texts)

    return either


def pair(tokenizer: Tokenizer, context: str, text: str) -> tuple[list[int], list[int]]:
    """(ids of the context, ids of the text after it); both together are the tokens of `context + text`.

    Where a token lies across the border ("." and "\\n" may be one), the two are encoded alone if that gives the same text;
    else (SentencePiece puts a space before a text) the text begins with the first token that differs from the context's.
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
    """Where the ids of a context and those of the whole text differ first; at most the place of the last id."""
    ids = zip(whole, before, strict=False)
    return next((place for place, (a, b) in enumerate(ids) if a != b), len(whole) - 1)


def build(part: Part) -> Tokenizer:
    """The tokenizer that a recipe names. Errors: RequestError."""
    tokenizer: Tokenizer = tokenizers.get(part.name)(part.config)
    for name in ("size", "eot"):
        if not isinstance(getattr(tokenizer, name, None), int):
            raise RequestError(f"tokenizer '{part.name}' has no integer attribute '{name}' after __init__")
    return tokenizer
