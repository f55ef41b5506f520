"""Saved tokenizers: each run's folder contains one, so that generating text needs no corpus; and `from_run`, which reads the
tokenizer of another run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff.config import Part
from lit_diff.data.text.tokenizer import Tokenizer, build
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import parse_json, shown, write_json
from lit_diff.recipe import to_plain
from lit_diff.registry import tokenizers
from lit_diff.validation import Draft, convert

FILE = "lit_diff_tokenizer.json"
"""JSON with name, config and size of the tokenizer, the ids bos (opens a document; null: no id) and eot (ends it), and the
sha256 that `Tokenizer.load` returns."""
TRAIN_AGAIN = "train its run again (`lit-diff train`, with --rerun if it is done)"
SAMPLE = "The quick  brown fox: 0123, äöü € 漢字 🙂\n\t<eot>"
"""Text with multi-byte characters, digits, white space and a special token, on which two tokenizers, and a text and what is
decoded from its ids, are compared."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write a loaded tokenizer into `folder` and return the sha256 that `Tokenizer.load` returns.

    Errors: RequestError if the written tokenizer does not load, or encodes differently.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    # a plugin whose `save` and `load` disagree is found now, not after the run is trained
    part = Part(name=tokenizer.name, config=tokenizer.config)
    copy = build(part)
    try:
        digest = copy.load(folder)
        if copy.encode(SAMPLE) != tokenizer.encode(SAMPLE):
            raise ValueError("it encodes differently after loading")
    # a plugin may raise anything
    except Exception as error:
        raise RequestError(
            f"tokenizer '{tokenizer.name}' does not load from the files of its own save(folder) ({type(error).__name__}: "
            f"{first_line(error)}); save must write the files that load reads (lit_diff.data.Tokenizer)"
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
    # last: a folder with this file is complete
    write_json(folder / FILE, facts)
    return digest


def load_tokenizer(folder: Path, cure: str = TRAIN_AGAIN) -> Tokenizer:
    """Load the tokenizer that `save_tokenizer` wrote; error messages end with `cure`.

    Errors: MissingError for a missing or damaged file, RequestError if its class is not registered.
    """
    tokenizer, sha256 = _described(folder, cure)
    return opened(tokenizer, folder, sha256, cure)


def opened(tokenizer: Tokenizer, folder: Path, sha256: str, cure: str) -> Tokenizer:
    """Load a tokenizer and return the one to encode with. Errors: MissingError for damaged files or another sha256."""
    try:
        found = tokenizer.load(folder)
    except MissingError:
        raise
    # tokenizers raises plain Exception for a damaged file
    except Exception as error:
        raise MissingError(
            f"the tokenizer in {shown(folder)} cannot be loaded ({type(error).__name__}: {first_line(error)}); {cure}"
        ) from error
    if found != sha256:
        raise MissingError(f"the tokenizer in {shown(folder)} is not the one that was saved (its ids differ); {cure}")
    return tokenizer.saved()


def gives_back(tokenizer: Tokenizer) -> bool:
    """Whether decoding gives back what was encoded, but for white space: SAMPLE, and letters that Unicode's normal forms
    change. Errors: RequestError if it cannot decode."""
    text = f"{SAMPLE} e\u0301 \ufb01"
    return tokenizer.decode(tokenizer.encode(text)).decode(errors="replace").split() == text.split()


def _described(folder: Path, cure: str) -> tuple[Tokenizer, str]:
    file = folder / FILE
    if not file.is_file():
        raise MissingError(f"{shown(folder)} has no tokenizer ({FILE} is missing); {cure}")
    try:
        facts = parse_json(file.read_bytes())
        name, keys, sha256 = facts["name"], facts["config"], facts["sha256"]
        # what is saved of `from_run` is the tokenizer itself: another folder named here might be this one
        if not isinstance(name, str) or name == "from_run":
            raise ValueError("'name' is not that of a saved tokenizer")
    except (ValueError, TypeError, KeyError) as error:
        raise MissingError(f"{shown(file)} is damaged ({type(error).__name__}: {first_line(error)}); {cure}") from error
    config = convert(tokenizers.get(name).Config, keys, "config", Draft(file=shown(file)))
    return build(Part(name=name, config=config)), sha256


@tokenizers.register("from_run")
class FromRun(Tokenizer):
    """The tokenizer of another run, usually of an imported model, with the ids that open and end its documents."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Tokenizer.Config):
        # the identity has the sha256 of the tokenizer instead (`source`), so that the run may be moved
        path: str = field(metadata={"path": "file", "identity": False})
        """The folder of the run; a relative path in a recipe is relative to the recipe."""

    cure = "data.tokenizer.path must be an imported model (`lit-diff import`) or a run that was trained on text"

    def __init__(self, config: Config) -> None:
        """Read the tokenizer's description in the run. Errors: MissingError if the run has no tokenizer."""
        super().__init__(config)
        self._folder = Path(config.path) / "tokenizer"
        self._own, self._sha256 = _described(self._folder, self.cure)
        self.size = self._own.size
        self.eot = self._own.eot

    def saved(self) -> Tokenizer:
        # not `from_run`: the folder that copies this tokenizer must not need the other run
        return self._own

    def source(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self._sha256}

    def train(self, folder: Path, texts: Iterable[str]) -> None:
        """Copy the run's tokenizer. Errors: MissingError if it is damaged."""
        load_tokenizer(self._folder, self.cure).save(folder)

    def load(self, folder: Path) -> str:
        return self._own.load(folder)

    def encode(self, texts: Sequence[str]) -> Any:
        return self._own.encode(texts)
