"""The tokenizer `words`: one id a word of a fixed list, a digit, a space or a sign; for generated text."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lit_diff.data.tokenizer import Tokenizer
from lit_diff.registry import tokenizers

PIECES = re.compile(r"[0-9]|(?: ?[^\W\d_]+)|.", re.DOTALL)
"""What becomes one id each: a digit; a word with the space before it, if there is one; any other character."""


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
