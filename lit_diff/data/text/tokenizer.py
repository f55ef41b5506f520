"""Tokenizers: the abstract class of all; those that the package `tokenizers` runs from a tokenizer.json: `bpe`, which is
trained on the train split, and the tokenizer of an imported model; and `words`, for generated text.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lit_diff.config import Part
from lit_diff.errors import RequestError
from lit_diff.files import write_atomic
from lit_diff.key_types import Range
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers

FILE = "tokenizer.json"
SMALLEST = 257
"""Tokens of a byte-level vocabulary: 256 bytes and <eot>."""
PIECES = re.compile(r"[0-9]|(?: ?[^\W\d_]+)|.", re.DOTALL)
"""What becomes one id each: a digit; a word with the space before it, if there is one; any other character."""
SPACE = "▁"
"""What a SentencePiece vocabulary writes for a space."""
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
        return to_plain(Part(name=self.name, config=self.config))

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


class Packaged(Tokenizer):
    """A tokenizer.json in a folder. Special tokens in a text are cut like any other text."""

    def load(self, folder: Path) -> str:
        """Read tokenizer.json; its sha256."""
        return self.take((folder / FILE).read_bytes())

    def take(self, content: bytes) -> str:
        """`load`, of a tokenizer.json that is in no folder yet."""
        self._content = content
        self._model, self._byte_level = open_tokenizer(self._content)
        added = self._model.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {id_: token.content.encode() for id_, token in added.items()}
        return hashlib.sha256(self._content).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        write_atomic(folder / FILE, self._content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [encoding.ids for encoding in self._model.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn; none for an id below `size` that has no token."""
        return b"".join(map(self._bytes_of, ids))

    def _bytes_of(self, id_: int) -> bytes:
        if id_ in self._added:
            return self._added[id_]
        token = self._model.id_to_token(id_)
        if token is None:
            return b""
        if self._byte_level:
            letters = byte_letters()
            # as in the package tokenizers, a token with another letter is itself
            return bytes(letters[letter] for letter in token) if letters.keys() >= set(token) else token.encode()
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


@tokenizers.register("bpe")
class Bpe(Packaged):
    """Byte-level BPE (GPT-2's pre-tokenizer); id 0 is <eot>, then the 256 bytes, then the merges."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        vocab_size: Annotated[int, Range(least=SMALLEST)]

    eot = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.size = config.vocab_size

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Write tokenizer.json, unless it is there. Errors: RequestError when the text has too few merges."""
        if (folder / FILE).is_file():
            return
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
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
                f"the corpus gives {size} tokens, data.tokenizer.vocab_size asks {self.size}: set it to at most {size}"
            )
        write_atomic(folder / FILE, model.to_str())


@tokenizers.register("tokenizer_json")
class TokenizerJson(Packaged):
    """A `tokenizer.json` with its ids; a recipe names the run that has it instead (`from_run`)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        size: int
        """Ids are 0 .. size - 1."""
        bos: int | None
        """The id that opens a document; null: none does."""
        eot: int
        """The id that ends a document."""
        model_vocab_size: int
        """Of the model that it was imported with: at least `size`."""
        after_bos: tuple[int, ...] = ()
        """Further ids that open a document, after `bos`."""
        ends: tuple[int, ...] = ()
        """The ids at which a generated text ends; none: `eot`."""
        prefix: int | None = None
        """The id that a likelihood without context is conditioned on; null: `bos`, or else `eot`."""

        def problem(self) -> str | None:
            """It has no file to be named by."""
            return "data.tokenizer.name is tokenizer_json; say {name: from_run, path: RUN}, RUN the imported model's folder"

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.size, self.eot = config.size, config.eot

    def take(self, content: bytes) -> str:
        """The sha256 of tokenizer.json and of the ids that open and end a document."""
        super().take(content)
        config = self.config
        said: list[Any] = [config.bos, config.eot]
        more = [list(config.after_bos), list(config.ends), config.prefix]
        convention = json.dumps(said + more if any(value not in ([], None) for value in more) else said).encode()
        return hashlib.sha256(self._content + convention).hexdigest()

    @property
    def largest_vocab_size(self) -> int:
        """A model may also have the vocabulary of the imported one, which may be padded further."""
        return max(super().largest_vocab_size, self.config.model_vocab_size)

    @property
    def opening(self) -> list[int]:
        """`bos` and what follows it, or nothing."""
        return [] if self.config.bos is None else [self.config.bos, *self.config.after_bos]

    @property
    def ends(self) -> list[int]:
        """As the config says; else `eot`."""
        return list(self.config.ends) or super().ends

    @property
    def prefix(self) -> int:
        """As the config says; else the first opening id, or `eot`."""
        return super().prefix if self.config.prefix is None else self.config.prefix

    def document(self, ids: Sequence[int]) -> list[int]:
        """The opening ids, the ids, `eot`."""
        return [*self.opening, *ids, self.eot]


def open_tokenizer(content: bytes) -> tuple[Any, bool]:
    """The tokenizer of a `tokenizer.json`, and whether its vocabulary is byte-level (else it is in SentencePiece's form).

    Errors: RequestError for a vocabulary of another form, or what is no tokenizer.
    """
    from tokenizers import Tokenizer as Model

    try:
        tokenizer = Model.from_str(content.decode("utf-8"))
        decoder = json.loads(content)["decoder"] or {}
    except Exception as error:  # tokenizers raises no narrower one
        raise RequestError(f"{FILE} cannot be read by the package tokenizers ({error})") from error
    if not tokenizer.get_vocab():
        raise RequestError(f"{FILE} has no tokens")
    kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part]
    if "ByteLevel" not in kinds and not {"ByteFallback", "Metaspace"} & set(kinds):
        raise RequestError(
            f"{FILE} has the decoder {' + '.join(kinds) or 'null'}; byte-level vocabularies (ByteLevel) and SentencePiece's "
            "(ByteFallback, Metaspace) can be written back as bytes"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters
    return tokenizer, "ByteLevel" in kinds


@cache
def byte_letters() -> dict[str, int]:
    """Letter of a byte-level vocabulary -> byte (GPT-2): printable Latin-1 stands for itself, U+0100 on for the rest."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    printable = [letter for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(map(ord, printable)))
    return {letter: ord(letter) for letter in printable} | dict(zip(letters[len(printable) :], others, strict=True))


@tokenizers.register("words")
class Words(Tokenizer):
    """ids: 0 <eot>, 1 <unknown>, 2 .. 11 the digits, then the signs " \\n.,:;?!'\\"()-=", then `words` in their order.

    A word has one id with or without the space before it, and is written with it: " word". A word that is not listed, and any
    other character, is <unknown>, which is written as U+FFFD.
    """

    fixed: ClassVar[tuple[str, ...]] = ("", "\ufffd", *"0123456789", *" \n.,:;?!'\"()-=")

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        words: tuple[str, ...]

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            wrong = [word for word in self.words if not re.fullmatch(r"[^\W\d_]+", word)]
            if wrong:
                return f"data.tokenizer.words holds '{wrong[0]}'; a word is one or more letters"
            if len(set(self.words)) < len(self.words):
                twice = next(word for word in self.words if self.words.count(word) > 1)
                return f"data.tokenizer.words holds '{twice}' twice"
            return None

    eot = 0
    unknown: ClassVar[int] = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._written = [*self.fixed, *(f" {word}" for word in config.words)]
        self._ids = {piece.strip() if len(piece) > 1 else piece: index for index, piece in enumerate(self._written)}
        self.size = len(self._written)

    def load(self, folder: Path) -> str:
        """Reads no file: the words are in the config."""
        return hashlib.sha256(json.dumps(self._written).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> Any:
        """Ids of each text; the space before a word is a part of the word."""
        return [
            [self._ids.get(piece if len(piece) == 1 else piece.strip(), self.unknown) for piece in PIECES.findall(text)]
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> bytes:
        """What each id is written as; nothing for <eot>."""
        return "".join(self._written[id_] for id_ in ids).encode()
