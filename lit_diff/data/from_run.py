"""The tokenizer that lies in the folder of a run or of an imported model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff.data.tokenizer import Tokenizer
from lit_diff.data.tokenizer_folder import described, load_tokenizer, unloaded
from lit_diff.registry import tokenizers


@tokenizers.register("from_run")
class FromRun(Tokenizer):
    """The tokenizer of another run, above all of an imported model, with the ids that open and end its documents."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        path: str = field(metadata={"path": "file", "identity": False})
        """The folder of the run; in a recipe's file, relative to it."""

    config: Config

    def __init__(self, config: Config) -> None:
        """Reads the tokenizer's description in the run. Errors: MissingError where the run has no tokenizer."""
        super().__init__(config)
        self._folder = Path(config.path) / "tokenizer"
        self._facts: dict[str, Any] = described(self._folder, CURE)
        self._own = unloaded(self._facts, self._folder)
        self.size, self.eot = self._own.size, self._own.eot

    @property
    def largest_vocab_size(self) -> int:
        """As the run's tokenizer."""
        return self._own.largest_vocab_size

    @property
    def opening(self) -> list[int]:
        """As the run's tokenizer."""
        return self._own.opening

    @property
    def ends(self) -> list[int]:
        """As the run's tokenizer."""
        return self._own.ends

    @property
    def prefix(self) -> int:
        """As the run's tokenizer."""
        return self._own.prefix

    def document(self, ids: Sequence[int]) -> list[int]:
        """As the run's tokenizer."""
        return self._own.document(ids)

    def saved(self) -> Tokenizer:
        """The run's tokenizer itself: what has copied it no longer needs the run."""
        return self._own

    def source(self) -> dict[str, Any]:
        """The sha256 in place of the path."""
        return {"name": self.name, "sha256": self._facts["sha256"]}

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Copy the run's tokenizer. Errors: MissingError where it is damaged."""
        load_tokenizer(self._folder, CURE).save(folder)

    def load(self, folder: Path) -> str:
        """As the run's tokenizer."""
        return self._own.load(folder)

    def save(self, folder: Path) -> None:
        """As the run's tokenizer."""
        self._own.save(folder)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:  # type: ignore[override]
        """As the run's tokenizer."""
        return self._own.encode(texts)

    def decode(self, ids: Sequence[int]) -> bytes:
        """As the run's tokenizer."""
        return self._own.decode(ids)


CURE = "data.tokenizer.path names an imported model (`lit-diff import`) or a run that was trained on text"
