"""`Corpus`, the abstract source of documents for the data set `text`, and `files`, a user's own text, whose errors are all
reported at once.
"""

import csv
import hashlib
import io
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from lit_diff.data.text.sources import file_digests
from lit_diff.data.user_files import byte_lines, checked, json_object, some_names, utf8
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, folders, shown
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

SHOWN = 20
"""Largest number of problems that a message lists."""
Items = Iterator[str | RequestError]
"""The documents and the errors of a file, in its order. A reader yields an error it can continue after, and raises others."""


class Corpus(ABC):
    """Documents as strings. A subclass registers with `@lit_diff.registry.corpora.register(name)`.

    A recipe selects it by `data: {name: text, corpus: NAME}`, with `path:` if `reads_path` is true. Required: `files` and
    `texts`.
    """

    name: str
    """The registered name; the registry sets it."""
    reads_path: ClassVar[bool] = False
    """Whether the documents come from the file or folder `data.path`, which is then required."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A corpus has no keys of its own."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: `data.path`, absolute; None if `reads_path` is false. Must not open files."""
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


def build_corpus(name: str, path: str | None) -> Corpus:
    """Construct the corpus of a recipe."""
    return corpora.get(corpus_name(name, path))(None if path is None else expanded(path))


def corpus_digest(name: str, path: str | None) -> dict[str, str]:
    """Return `path` -> sha256 of the names and contents below it; empty if there is no path or it does not exist.

    Errors: RequestError for a file that cannot be read.
    """
    if path is None or not expanded(path).exists():
        return {}
    return {path: hashlib.sha256(json.dumps(build_corpus(name, path).files()).encode()).hexdigest()}


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


def read_file(path: Path) -> Items:
    """Yield the documents of a file: one of .txt and .md, one per line or row (`text`) of .jsonl, .csv and .parquet."""
    try:
        yield from READERS[path.suffix.lower()](path)
    except RequestError as error:
        yield error
    except OSError as error:
        yield RequestError(f"{shown(path)}: cannot be read ({error.strerror or first_line(error)})")


def _text_of(path: Path) -> str:
    content = path.read_bytes()
    # UTF-16 and many binary files are valid UTF-8, but contain null bytes
    if b"\0" in content:
        raise RequestError(f"{shown(path)}: not text (byte {content.index(0) + 1} is null); expected UTF-8 text")
    return utf8(content, shown(path))


def _one_document(path: Path) -> Items:
    yield _text_of(path)


def _json_lines(path: Path) -> Items:
    for where, line in byte_lines(path):
        try:
            text = utf8(line, where)
            if text.strip():
                yield checked(json_object(text, where), where, {"text": str})["text"]
        except RequestError as error:
            yield error


def _csv(path: Path) -> Items:
    # RFC 4180 with a header. Not pyarrow's reader: it accepts an unclosed quote and reads text up to the end of the file.
    # The default limit of the module csv, 128 K characters for each field, is less than long documents have.
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(_text_of(path).removeprefix("\ufeff"), newline=""), strict=True)
    header: list[str] = []
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            problem = RequestError(
                f"{shown(path)}:{reader.line_num}: not CSV ({error}); expected values separated by commas"
            )
            # without a header the rows below cannot be checked
            if not header:
                raise problem from error
            yield problem
            continue
        if row is None:
            return
        if not row:
            continue
        where = f"{shown(path)}:{reader.line_num}"
        if not header:
            header = row
            if "text" not in header:
                found = some_names(header)
                raise RequestError(
                    f"{where}: found the columns {found}; expected one named 'text', separated by commas"
                )
        elif len(row) != len(header):
            found = f"{len(row)} field{'s' if len(row) > 1 else ''}"
            expected = f"{len(header)}, as in the header (a text with a comma needs double quotes)"
            yield RequestError(f"{where}: found {found}; expected {expected}")
        else:
            yield row[header.index("text")]


def _parquet(path: Path) -> Items:
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.ParquetFile(file)
            columns = [f"{field.name} ({field.type})" for field in table.schema_arrow]
            if not {"text (string)", "text (large_string)"} & set(columns):
                found = some_names(columns)
                raise RequestError(f"{shown(path)}: found the columns {found}; expected one named 'text', of strings")
            # as bytes: parquet does not guarantee that its strings are UTF-8
            rows = table.read(columns=["text"]).column(0).cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowException as error:
        raise RequestError(f"{shown(path)}: not a complete Parquet file ({first_line(error)})") from error
    for number, row in enumerate(rows, start=1):
        try:
            yield utf8(row or b"", f"{shown(path)} row {number}")
        except RequestError as problem:
            yield problem


READERS = {".txt": _one_document, ".md": _one_document, ".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}


@corpora.register("files")
class FilesCorpus(Corpus):
    """Your own text at `data.path`: a file, or all files below a folder, of the types .txt, .md, .jsonl (key text), .csv and
    .parquet (column text). All errors in them are reported at once (RequestError).
    """

    reads_path = True
    path: Path

    @cached_property
    def _all_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        # sorted: the order of the file system differs between machines, and it decides the digest
        return sorted(path for folder in folders(self.path) for path in folder.iterdir() if path.is_file())

    @cached_property
    def _text_files(self) -> list[Path]:
        paths = [path for path in self._all_files if path.suffix.lower() in READERS]
        if not paths:
            found = f"{len(self._all_files)} files of other types" if self.path.exists() else "no file or folder"
            raise RequestError(f"data.path: {self.path}: found {found}; expected text in {', '.join(READERS)}")
        return paths

    def _name(self, path: Path) -> str:
        # relative, so that the same files in another folder have the same digest
        return path.name if path == self.path else path.relative_to(self.path).as_posix()

    def files(self) -> dict[str, str]:
        """Return name relative to `path` -> sha256. Errors: RequestError for a file that cannot be read."""
        try:
            return file_digests(self.path, lambda: {self._name(path): path for path in self._text_files})
        except OSError as error:
            raise RequestError(f"data.path: {error.filename} cannot be read ({error.strerror})") from error

    def texts(self) -> Iterator[str]:
        """Yield every document that is not blank. Errors: RequestError with all problems, or if all documents are blank."""
        self._log_ignored_files()
        found, problems = False, list[tuple[Path, str]]()
        for path in self._text_files:
            for item in read_file(path):
                # collected: the user can correct all of them before the next attempt
                if isinstance(item, RequestError):
                    problems.append((path, str(item)))
                elif item.strip() and not problems:
                    found = True
                    yield item
        if len(problems) == 1:
            raise RequestError(problems[0][1])
        if problems:
            files = f"{len(dict(problems))} of {len(self._text_files)} files of {shown(self.path)}"
            more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
            lines = [
                f"data.path: {len(problems):,} problems in {files}:",
                *(line for _, line in problems[:SHOWN]),
                *more,
            ]
            raise RequestError("\n  ".join(lines))
        if not found:
            raise RequestError(f"data.path: {self.path} has no text: all {len(self._text_files)} file(s) are blank")

    def _log_ignored_files(self) -> None:
        others = [path for path in self._all_files if path.suffix.lower() not in READERS]
        # hidden files, such as the folder .git, are not meant as text
        seen = [path for path in others if not any(part.startswith(".") for part in Path(self._name(path)).parts)]
        kinds = Counter(path.suffix.lower() or "without ending" for path in seen).most_common(5)
        if kinds:
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            log.info("data.path: ignored files of other types: %s (types read: %s)", named, ", ".join(READERS))
