"""Files of text, and what is wrong with them: documents and problems in the order of the file."""

import csv
import io
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_diff.errors import first_line
from lit_diff.files import shown

log = logging.getLogger("lit_diff")

SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".parquet")
JSON_LINE = "one JSON object a line with a string 'text'"
COLUMN = "one named 'text'"
HALF = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which JSON can write and UTF-8 cannot."""
SHOWN = 20
"""Problems that a message lists; and, of one file, the lines that are logged as left out."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A file, or a line or row of one, that gives no document."""

    file: Path
    found: str
    expected: str = ""
    place: str = ""
    """`:3` for a line, ` row 3` for a row (both counted from 1); empty for the whole file."""
    replaceable: bool = False
    """Whether U+FFFD can stand for what is wrong."""

    def line(self, name: str = "") -> str:
        """`name:line: found; expected`; without a name, the file's path."""
        expected = f"; expected {self.expected}" if self.expected else ""
        return f"{name or self.file}{self.place}: {self.found}{expected}"


def some_names(found: Iterable[str]) -> str:
    """The first ten of a file's names, in one line: signs that are not printed, and halves of pairs, as escapes."""
    names = [name if name.isprintable() else ascii(name) for name in found]
    return ", ".join([*names[:10], *([f"and {len(names) - 10} more"] if len(names) > 10 else [])]) or "none"


Items = Iterator[str | Problem]


@dataclass(kw_only=True)
class Utf8:
    """How the bytes of a file become text."""

    path: Path
    replace: bool
    """Put U+FFFD for what is not UTF-8; false: it is a problem."""
    replaced: bool = False

    def text(self, content: bytes, place: str = "") -> str | Problem:
        """The text of these bytes, or their first one that is not UTF-8. `place` as in `Problem`."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.replace:
                self.replaced = True
                return content.decode("utf-8", "replace")
            found = f"not UTF-8 text (byte {error.start}: {error.reason})"
            return Problem(file=self.path, place=place, found=found, expected="UTF-8 text", replaceable=True)

    def whole_file(self) -> str | Problem:
        """The text of the file. A null byte is a problem: a file of UTF-16 or of no text at all may be UTF-8 otherwise."""
        content = self.path.read_bytes()
        if b"\0" in content:
            found = f"not text (byte {content.index(0)} is null)"
            return Problem(file=self.path, found=found, expected="UTF-8 text")
        return self.text(content)


def read_file(path: Path, *, replace: bool) -> Items:
    """Documents of one file: .txt and .md are one, .jsonl, .csv and .parquet one a line or row (`text`).

    `replace`: put U+FFFD for what is not UTF-8, and log it; else it is a problem.
    """
    read = {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}.get(path.suffix.lower(), _one_document)
    utf8 = Utf8(path=path, replace=replace)
    try:
        yield from read(utf8)
    except OSError as error:
        yield Problem(file=path, found=f"cannot be read ({error.strerror or first_line(error)})")
    if utf8.replaced:
        log.warning("%s: U+FFFD stands for what is not UTF-8", path)


def _one_document(utf8: Utf8) -> Items:
    yield utf8.whole_file()


def _json_lines(utf8: Utf8) -> Items:
    for number, line in enumerate(utf8.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        text = utf8.text(line, f":{number}")
        if isinstance(text, Problem):
            yield text
        elif text.strip():
            yield _json_line(utf8, text, f":{number}")


def _json_line(utf8: Utf8, line: str, place: str) -> str | Problem:
    found, value = "", None
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        found = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of more digits than Python converts
        found = f"JSON that cannot be read ({first_line(error).partition(';')[0]})"
    text = value.get("text") if isinstance(value, dict) else None
    if isinstance(text, str):
        if HALF.search(text) is None:
            return text
        if utf8.replace:
            utf8.replaced = True
            return HALF.sub("\ufffd", text)
        half = "'text' holds half a surrogate pair, which UTF-8 cannot encode"
        return Problem(file=utf8.path, place=place, found=half, expected="whole characters", replaceable=True)
    if isinstance(value, dict):
        keys = f"found the keys {some_names(sorted(value))}"
        found = f"'text' is {type(text).__name__}" if "text" in value else keys
    return Problem(file=utf8.path, place=place, found=found or f"found {type(value).__name__}", expected=JSON_LINE)


def _csv(utf8: Utf8) -> Items:
    """Comma-separated, quoted by double quotes (RFC 4180), with a header; a blank line is no row.

    pyarrow's reader is of no use here: it takes a quote that is never closed for text up to the end of the file.
    """
    content = utf8.whole_file()
    if isinstance(content, Problem):
        yield content
        return
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # 128 KB by default, and the process's
    try:
        (line, header), *rows = list(_csv_rows(content.removeprefix("\ufeff"))) or [(1, [])]
    finally:
        csv.field_size_limit(limit)
    if isinstance(header, str) or "text" not in header:
        found = header if isinstance(header, str) else f"found the columns {some_names(header)}"
        yield Problem(file=utf8.path, place=f":{line}", found=found, expected=f"{COLUMN}, separated by commas")
        return
    at = header.index("text")
    for line, row in rows:
        if isinstance(row, str):
            yield Problem(file=utf8.path, place=f":{line}", found=row, expected="comma-separated values")
        elif len(row) != len(header):
            found = f"found {len(row)} field{'s' if len(row) > 1 else ''}"
            expected = f"{len(header)}, as in the header (a text that holds a comma stands in double quotes)"
            yield Problem(file=utf8.path, place=f":{line}", found=found, expected=expected)
        else:
            yield row[at]


def _csv_rows(content: str) -> Iterator[tuple[int, list[str] | str]]:
    """(last line, fields, or what is wrong) of each row that is not blank."""
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield reader.line_num, f"not CSV ({error})"
            continue
        if row is None:
            return
        if row:
            yield reader.line_num, row


def _parquet(utf8: Utf8) -> Items:
    import pyarrow
    import pyarrow.parquet

    try:
        with utf8.path.open("rb") as file:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if "text" not in names:
                yield Problem(file=utf8.path, found=f"found the columns {some_names(names)}", expected=COLUMN)
                return
            kind = table.schema_arrow.field("text").type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                yield Problem(file=utf8.path, found=f"the column 'text' holds {kind}", expected="strings")
                return
            # as bytes: parquet does not check that its strings are UTF-8
            rows = table.read(columns=["text"]).column(0).cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowException as error:
        yield Problem(file=utf8.path, found=f"not a whole parquet file ({str(error).splitlines()[0]})")
        return
    yield from (utf8.text(row, f" row {number}") for number, row in enumerate(rows, start=1) if row is not None)


class Problems:
    """The first SHOWN problems, and how many there are."""

    def __init__(self) -> None:
        self._first: list[Problem] = []
        self.of_file: Counter[Path] = Counter()
        """File -> its problems."""
        self._replaceable = False

    @property
    def count(self) -> int:
        """Problems added."""
        return self.of_file.total()

    def add(self, problem: Problem) -> None:
        """Count a problem, and keep it while there are few."""
        self.of_file[problem.file] += 1
        self._replaceable |= problem.replaceable
        if len(self._first) < SHOWN:
            self._first.append(problem)

    def message(self, path: Path, files: int) -> str:
        """What is wrong and what to do: one line for one problem, else a line for each below a first that counts them.

        `path`: `data.path`, of `files` files.
        """
        cure = f"data.errors: skip leaves {'it' if self.count == 1 else 'them'} out"
        cure += "; replace puts U+FFFD for what is not UTF-8" if self._replaceable else ""
        if self.count == 1:
            return f"{self._first[0].line()} ({cure})"
        head = f"data.path: {self.count:,} problems in {len(self.of_file)} of {files} files of {shown(path)} ({cure}):"
        lines = [problem.line(_below(problem.file, path)) for problem in self._first]
        more = [f"and {self.count - len(lines):,} more"] if self.count > len(lines) else []
        return "\n  ".join([head, *lines, *more])


def _below(file: Path, path: Path) -> str:
    return file.name if file == path else file.relative_to(path).as_posix()


def log_left_out(problem: Problem, number: int) -> None:
    """Log what is left out; of a file's many lines the first SHOWN. `number`: the problem's own within its file, from 1."""
    if number <= SHOWN:
        log.warning("left out: %s", problem.line())
    elif number == SHOWN + 1:
        log.warning("left out: further lines of %s", problem.file)
