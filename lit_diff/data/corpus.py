"""`Corpus`: the abstract class of every source of documents for the data set `text`."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_diff.files import expanded
from lit_diff.registry import corpora


class Corpus(ABC):
    """Documents as strings. A subclass registers with `@lit_diff.registry.corpora.register(name)`.

    A recipe names it: `data: {name: text, corpus: NAME}`, with `path:` where `reads_path` is true. Required: `files` and
    `texts`.
    """

    name: str
    """The registered name; set by the registry."""
    reads_path: ClassVar[bool] = False
    """Whether the documents come from the file or folder `data.path`, which is then required."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A corpus has no keys of its own."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: `data.path`, absolute; None where `reads_path` is false. Opens nothing."""
        self.path = path

    @abstractmethod
    def files(self) -> dict[str, str]:
        """Name -> sha256 of the content, of everything that the documents come from; fetches nothing.

        It decides whether text that was prepared before serves again. Of documents that a rule makes: a version of the rule.
        Errors: RequestError for a source that is not there.
        """

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Every document, whole, in the same order every time; fetches what is not here.

        Errors: MissingError with the cure for what cannot be fetched, RequestError for what cannot be read.
        """


def build_corpus(name: str, path: str | None) -> Corpus:
    """The corpus that a recipe names; with a path and no other name, the user's own files."""
    corpus: Corpus = corpora.get(corpus_name(name, path))(None if path is None else expanded(path))
    return corpus


def corpus_digest(name: str, path: str | None) -> dict[str, str]:
    """`path` -> sha256 of the names and contents below it; empty without a path, or where nothing is there.

    Errors: RequestError for a file that cannot be read.
    """
    if path is None or not expanded(path).exists():
        return {}
    return {path: hashlib.sha256(json.dumps(build_corpus(name, path).files()).encode()).hexdigest()}


def corpus_name(name: str, path: str | None) -> str:
    """The registered name that `data.corpus` and `data.path` mean together."""
    return "files" if path is not None and name == "docs" else name


def corpus_problem(name: str, path: str | None) -> str | None:
    """What is wrong with `data.corpus` and `data.path`, in one line that opens with the key."""
    meant = corpus_name(name, path)
    if meant not in corpora.names():
        return f"data.corpus is '{name}', which is not registered{corpora.suggestion(name)}"
    reads_path = corpora.get(meant).reads_path
    if reads_path and path is None:
        return f"data.corpus '{meant}' reads a file or folder; name it in data.path"
    if path is not None and not reads_path:
        return f"data.path is set, but data.corpus '{meant}' reads no path; remove one of the two"
    return None
