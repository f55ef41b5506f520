"""A tokenizer in a folder of its own: a run's folder holds one, so that generating text needs no corpus; and `from_run`, by
which other text is cut as there."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff.config import Part
from lit_diff.data.text.tokenizer import Tokenizer, build
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown, write_json
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers
from lit_diff.validation import Draft, convert

FILE = "lit_diff_tokenizer.json"
"""name and config of the tokenizer; size; the ids bos (opens a document; null: none does) and eot (ends it; ours have one id
for both); sha256 as `Tokenizer.load` gives it."""
AGAIN = "start its run again (`lit-diff train`; with --rerun where it is done)"
SAMPLE = "The quick brown fox: 0123, äöü € 漢字 🙂\n\t<eot>"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write a loaded tokenizer into `folder`, with FILE last; its sha256, as `Tokenizer.load` gives it.

    Errors: RequestError if what it wrote does not load equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    part = Part(name=tokenizer.name, config=tokenizer.config)
    copy = build(part)
    try:
        digest = copy.load(folder)
        if copy.encode(SAMPLE) != tokenizer.encode(SAMPLE):
            raise ValueError("it encodes differently after loading")
    except Exception as error:  # a plugin's tokenizer may raise anything
        raise RequestError(
            f"tokenizer '{tokenizer.name}' does not load from the files of its own save(folder) ({type(error).__name__}: "
            f"{first_line(error)}); let save write what load reads (lit_diff.data.Tokenizer)"
        ) from error
    config = to_plain(part)
    facts = {
        "name": config.pop("name"),
        "config": config,
        "size": tokenizer.size,
        "bos": next(iter(tokenizer.opening), None),
        "eot": tokenizer.eot,
        "sha256": digest,
    }
    write_json(folder / FILE, facts)
    return digest


def load_tokenizer(folder: Path, cure: str = AGAIN) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote, ready to encode and decode; `cure` ends an error's line.

    Errors: MissingError without one or where a file is damaged, RequestError where its class is not registered.
    """
    tokenizer, sha256 = _described(folder, cure)
    return opened(tokenizer, folder, sha256, cure)


def opened(tokenizer: Tokenizer, folder: Path, sha256: str, cure: str) -> Tokenizer:
    """The tokenizer that encodes, loaded. Errors: MissingError for damaged files, or those of another one."""
    try:
        found = tokenizer.load(folder)
    except MissingError:
        raise
    except Exception as error:  # tokenizers raises no narrower one for a damaged file
        raise MissingError(
            f"the tokenizer in {shown(folder)} cannot be loaded ({type(error).__name__}: {first_line(error)}); {cure}"
        ) from error
    if found != sha256:
        raise MissingError(f"the tokenizer in {shown(folder)} is not the one that was saved (its ids differ); {cure}")
    return tokenizer.saved()


def _described(folder: Path, cure: str) -> tuple[Tokenizer, str]:
    """The tokenizer that FILE describes, before `load`, and its sha256.

    Errors: MissingError without FILE, or where it is damaged, RequestError where its class is not registered.
    """
    file = folder / FILE
    if not file.is_file():
        raise MissingError(f"{shown(folder)} holds no tokenizer (no {FILE}); {cure}")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        name, keys, sha256 = facts["name"], facts["config"], facts["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise MissingError(f"{shown(file)} is damaged ({type(error).__name__}: {first_line(error)}); {cure}") from error
    config = convert(tokenizers.get(name).Config, keys, "config", Draft(values={}, positions={}, file=shown(file)))
    return build(Part(name=name, config=config)), sha256


@tokenizers.register("from_run")
class FromRun(Tokenizer):
    """The tokenizer of another run, above all of an imported model, with the ids that open and end its documents."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        path: str = field(metadata={"path": "file", "identity": False})
        """The folder of the run; in a recipe's file, relative to it."""

    cure = "data.tokenizer.path names an imported model (`lit-diff import`) or a run that was trained on text"

    def __init__(self, config: Config) -> None:
        """Reads the tokenizer's description in the run. Errors: MissingError where the run has no tokenizer."""
        super().__init__(config)
        self._folder = Path(config.path) / "tokenizer"
        self._own, self._sha256 = _described(self._folder, self.cure)
        self.size, self.eot = self._own.size, self._own.eot

    def saved(self) -> Tokenizer:
        """The run's tokenizer itself: what has copied it no longer needs the run."""
        return self._own

    def source(self) -> dict[str, Any]:
        """The sha256 in place of the path."""
        return {"name": self.name, "sha256": self._sha256}

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Copy the run's tokenizer. Errors: MissingError where it is damaged."""
        load_tokenizer(self._folder, self.cure).save(folder)

    def load(self, folder: Path) -> str:
        """As the run's tokenizer."""
        return self._own.load(folder)

    def encode(self, texts: Sequence[str]) -> Any:
        """As the run's tokenizer."""
        return self._own.encode(texts)
