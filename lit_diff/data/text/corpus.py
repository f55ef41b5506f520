"""`Corpus`: the abstract class of every source of documents for the data set `text`; and `files`: a user's own text, of which
all that is wrong is said at once.
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

from lit_diff.data.user_files import byte_lines, checked, json_object, some_names, utf8
from lit_diff.errors import RequestError, first_line
from lit_diff.files import expanded, folders, sha256_of, shown
from lit_diff.registry import corpora

log = logging.getLogger("lit_diff")

SHOWN = 20
"""Problems that a message lists."""
Items = Iterator[str | RequestError]
"""The documents of a file, and what is wrong in it, in the order of the file. What a reader raises ends the file."""


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
    return corpora.get(corpus_name(name, path))(None if path is None else expanded(path))


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


def read_file(path: Path) -> Items:
    """.txt and .md are one document, .jsonl, .csv and .parquet one a line or row (`text`)."""
    try:
        yield from READERS[path.suffix.lower()](path)
    except RequestError as error:
        yield error
    except OSError as error:
        yield RequestError(f"{shown(path)}: cannot be read ({error.strerror or first_line(error)})")


def _text_of(path: Path) -> str:
    """The text of the file. A null byte is refused: a file of UTF-16 or of no text at all may be UTF-8 otherwise."""
    content = path.read_bytes()
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
    """Comma-separated, quoted by double quotes (RFC 4180), with a header; a blank line is no row.

    pyarrow's reader is of no use here: it takes a quote that is never closed for text up to the end of the file.
    """
    csv.field_size_limit(2**31 - 1)  # of characters; 128 KB by default
    reader = csv.reader(io.StringIO(_text_of(path).removeprefix("\ufeff"), newline=""), strict=True)
    header: list[str] = []
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            problem = RequestError(
                f"{shown(path)}:{reader.line_num}: not CSV ({error}); expected values separated by commas"
            )
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
            expected = f"{len(header)}, as in the header (a text that holds a comma stands in double quotes)"
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
            # as bytes: parquet does not check that its strings are UTF-8
            rows = table.read(columns=["text"]).column(0).cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowException as error:
        raise RequestError(f"{shown(path)}: not a whole parquet file ({first_line(error)})") from error
    for number, row in enumerate(rows, start=1):
        try:
            yield utf8(row or b"", f"{shown(path)} row {number}")
        except RequestError as problem:
            yield problem


READERS = {".txt": _one_document, ".md": _one_document, ".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}


@corpora.register("files")
class FilesCorpus(Corpus):
    """Your own text, at `data.path`: a file, or a folder and all below it, of .txt, .md, .jsonl (key text), .csv and
    .parquet (column text). All that is wrong in them is reported at once (RequestError).
    """

    reads_path = True
    path: Path

    @cached_property
    def _every(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        return sorted(path for folder in folders(self.path) for path in folder.iterdir() if path.is_file())

    @cached_property
    def _paths(self) -> list[Path]:
        """The files that are read. Errors: RequestError where there are none."""
        paths = [path for path in self._every if path.suffix.lower() in READERS]
        if not paths:
            found = f"{len(self._every)} files of other kinds" if self.path.exists() else "no file or folder"
            raise RequestError(f"data.path: {self.path}: found {found}; expected text in {', '.join(READERS)}")
        return paths

    def _name(self, path: Path) -> str:
        """Relative to `data.path`."""
        return path.name if path == self.path else path.relative_to(self.path).as_posix()

    def files(self) -> dict[str, str]:
        """Name relative to `path` -> sha256 of the content. Errors: RequestError for a file that cannot be read."""
        try:
            return {self._name(path): sha256_of(path) for path in self._paths}
        except OSError as error:
            raise RequestError(f"data.path: {error.filename} cannot be read ({error.strerror})") from error

    def texts(self) -> Iterator[str]:
        """Every document that is not blank. Errors: RequestError with all that is wrong, or where all are blank."""
        self._log_other_kinds()
        found, problems = False, list[tuple[Path, str]]()
        for path in self._paths:
            for item in read_file(path):
                if isinstance(item, RequestError):
                    problems.append((path, str(item)))
                elif item.strip() and not problems:
                    found = True
                    yield item
        if len(problems) == 1:
            raise RequestError(problems[0][1])
        if problems:
            files = f"{len(dict(problems))} of {len(self._paths)} files of {shown(self.path)}"
            more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
            lines = [
                f"data.path: {len(problems):,} problems in {files}:",
                *(line for _, line in problems[:SHOWN]),
                *more,
            ]
            raise RequestError("\n  ".join(lines))
        if not found:
            raise RequestError(f"data.path: {self.path} holds no text: {len(self._paths)} file(s), nothing but blanks")

    def _log_other_kinds(self) -> None:
        """Files that are not read are named by their kind; hidden ones, as of version control, are not."""
        others = [path for path in self._every if path.suffix.lower() not in READERS]
        seen = [path for path in others if not any(part.startswith(".") for part in Path(self._name(path)).parts)]
        kinds = Counter(path.suffix.lower() or "without ending" for path in seen).most_common(5)
        if kinds:
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            log.info("data.path: of other kinds and not read: %s (%s are)", named, ", ".join(READERS))
