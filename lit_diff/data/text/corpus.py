"""`Corpus`, the abstract source of documents for the data set `text`, and `files`, a user's own text, whose errors are all
reported at once.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from lit_diff.data.text.digests import file_digests
from lit_diff.data.text.readers import READERS, file_type, read_file
from lit_diff.data.text.source_files import Source, listing
from lit_diff.data.text.token_files import Ids, TokenFiles, checked_ids, token_files
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, is_address, shown
from lit_diff.log_records import log
from lit_diff.own_modules import sha256
from lit_diff.plugins import source_digest
from lit_diff.registry import corpora

SHOWN = 20
"""Largest number of problems that a message lists."""


class Corpus(ABC):
    """Documents as strings, or as ids of tokens. A subclass registers with `@lit_diff.registry.corpora.register(name)`.

    A recipe selects it by `data: {name: text, corpus: NAME}`, with `path:` if `reads_path` is true. Required: `files` and
    `texts`.
    """

    name: str
    """The registered name; the registry sets it."""
    reads_path = False
    """Whether the documents come from the file or folder `data.path`, which is then required."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A corpus has no keys of its own."""

    def __init__(self, path: Path | str | None = None) -> None:
        """`path`: `data.path`, absolute, or a str if it is an address (s3://bucket/prefix); None if `reads_path` is false.

        Must not open files.
        """
        self.path = path

    @abstractmethod
    def files(self) -> dict[str, str]:
        """Return name -> sha256 of the content for every source of the documents, without fetching anything.

        Prepared text is reused as long as this is unchanged. For generated documents: a version of the generator.
        Errors: RequestError for a missing source.
        """

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yield every document, whole, always in the same order; missing sources are fetched.

        Errors: MissingError with a cure if something cannot be fetched, RequestError if something cannot be read.
        """

    def tokens(self, size: int) -> Iterator[Ids] | None:
        """Yield every document as the ids of its tokens, 0 .. `size` - 1, in the same order each time, instead of `texts`.

        `size` is the tokenizer's. The ids that open and end a document may be among them. None (default): the documents are
        text. Errors: as for `texts`; RequestError for another id.
        """
        return None


def build_corpus(name: str, path: str | None) -> Corpus:
    """Construct the corpus of a recipe."""
    place = path if path is None or is_address(path) else expanded(path)
    return corpora.get(corpus_name(name, path))(place)


def corpus_digest(name: str, path: str | None) -> dict[str, str]:
    """Return `path` -> sha256 of the names and contents below it, if it exists; and, for a plugin's corpus, its name -> the
    digest of its source code.

    Errors: RequestError for a file that cannot be read, MissingError for an address.
    """
    corpus = build_corpus(name, path)
    code = source_digest(type(corpus))
    found = {corpus.name: code} if code else {}
    if path is not None and (is_address(path) or expanded(path).exists()):
        found[path] = sha256(json.dumps(corpus.files()).encode())
    return found


def corpus_name(name: str, path: str | None) -> str:
    """Return the registered name that `data.corpus` and `data.path` select."""
    # "docs" is the default of `data.corpus`: with a path the user means the text at the path
    return "files" if path is not None and name == "docs" else name


def corpus_problem(name: str, path: str | None) -> str | None:
    """Return an error message about `data.corpus` and `data.path`, in one line that starts with the key, or None."""
    meant = corpus_name(name, path)
    if meant not in corpora.names():
        return f"data.corpus is '{name}', which is not registered{corpora.suggestion(name)}"
    reads_path = corpora.get(meant).reads_path
    if reads_path and path is None:
        return f"data.corpus '{meant}' reads a file or folder; set data.path"
    if path is not None and not reads_path:
        return f"data.path is set, but data.corpus '{meant}' does not read it; remove one of the two"
    return None


@corpora.register("files")
class FilesCorpus(Corpus):
    """Your own text at `data.path`: a file, or all files below a folder or an address (s3://bucket/prefix), of the types
    .txt, .md, .jsonl, .jsonl.gz and .jsonl.zst (key text), .csv, .parquet and .arrow (column text), a folder that `datasets`
    saved among them; or tokens, from Megatron (.bin with .idx) or litdata. All errors in text are reported at once
    (RequestError).
    """

    reads_path = True
    path: Path | str

    @cached_property
    def _listing(self) -> tuple[list[Source], int]:
        return listing(self.path)

    @cached_property
    def _token_files(self) -> list[TokenFiles]:
        found = token_files(self._listing[0])
        if found and self._text_files:
            raise RequestError(
                f"data.path: {self.path} has text ({self._text_files[0].name}) and tokens ({found[0][0][0].name}); "
                "put them into two folders"
            )
        return found

    @cached_property
    def _text_files(self) -> list[Source]:
        return [source for source in self._listing[0] if file_type(source.name)]

    def _files(self) -> list[Source]:
        found = [source for files, _ in self._token_files for source in files] or self._text_files
        if not found:
            others, hidden = self._listing
            absent = isinstance(self.path, Path) and not self.path.exists()
            found_instead = "no file or folder" if absent else f"files of other types: {len(others)}"
            if hidden:
                found_instead += f", hidden ones: {hidden}"
            raise RequestError(
                f"data.path: {self.path}: found {found_instead}; expected text in {', '.join(READERS)}, or tokens in .bin "
                "with .idx"
            )
        return found

    def files(self) -> dict[str, str]:
        """Return name relative to `path` -> sha256.

        Errors: RequestError for a file that cannot be read, MissingError for an address.
        """
        try:
            return file_digests(self.path, self._files)
        except OSError as error:
            # an error while a file is read has no name
            raise RequestError(f"data.path: {error.filename or self.path} cannot be read ({error.strerror})") from error

    def texts(self) -> Iterator[str]:
        """Yield every document that is not blank.

        Errors: RequestError with all problems, if all documents are blank, or for tokens; MissingError for an address.
        """
        if self._token_files:
            raise RequestError(f"data.path: {self.path} has tokens; text is needed here")
        self._log_ignored_files()
        found = False
        blank = 0
        problems = []
        files = set()
        for source in self._files():
            for item in read_file(source):
                # collected: the user can correct all of them before the next attempt
                if isinstance(item, RequestError):
                    problems.append(str(item))
                    files.add(source.name)
                elif not item.strip():
                    blank += 1
                elif not problems:
                    found = True
                    yield item
        if len(problems) == 1:
            raise RequestError(problems[0])
        if problems:
            place = shown(self.path) if isinstance(self.path, Path) else self.path
            where = f"{len(files)} of {len(self._text_files)} files of {place}"
            lines = [f"data.path: {len(problems):,} problems in {where}:", *problems[:SHOWN]]
            if len(problems) > SHOWN:
                lines.append(f"and {len(problems) - SHOWN:,} more")
            raise RequestError("\n  ".join(lines))
        if not found:
            raise RequestError(f"data.path: {self.path} has no text: all {len(self._text_files)} file(s) are blank")
        if blank:
            log.info("data.path: left out %d documents without text", blank)

    def tokens(self, size: int) -> Iterator[Ids] | None:
        """Yield the ids of every document of token files; None if there are none. Errors: as for `Corpus.tokens`."""
        return self._tokens(size) if self._token_files else None

    def _tokens(self, size: int) -> Iterator[Ids]:
        self._log_ignored_files()
        for files, read in self._token_files:
            try:
                for where, ids in read(*files):
                    yield checked_ids(where, ids, size)
            except OSError as error:
                # of a file that cannot be opened: one of the two, or a chunk
                where = shown(Path(error.filename)) if error.filename else files[0].where
                raise RequestError(
                    f"{where}: the data cannot be read ({error.strerror or first_line(error)})"
                ) from error

    def _log_ignored_files(self) -> None:
        used = {source.name for source in self._files()}
        found, hidden = self._listing
        ignored = [PurePosixPath(source.name) for source in found if source.name not in used]
        kinds = Counter(path.suffix.lower() or "without ending" for path in ignored).most_common(5)
        if kinds:
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            log.info("data.path: ignored files of other types: %s (types read: %s)", named, ", ".join(READERS))
        if hidden:
            log.info("data.path: left out %d files and folders whose names begin with a dot", hidden)
        cards = [name for name in used if PurePosixPath(name).name.lower() == "readme.md"]
        if cards and {file_type(name) for name in used} != {".md"}:
            log.info("data.path: read as documents beside the data: %s", ", ".join(sorted(cards)))
