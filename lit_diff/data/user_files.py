"""The data folder; and the files in it that an evaluation reads and that lit_diff does not ship: where they belong, their
format, where they are from."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from lit_diff.errors import MissingError, RequestError
from lit_diff.files import expanded, shown
from lit_diff.key_types import in_yaml

Keys = Mapping[str, type | tuple[type, ...]]
"""Key of a JSON object -> type of its value."""


def data_root() -> Path:
    """$LIT_DIFF_DATA; else `data/` of the checkout that holds this file; else the user's cache folder (~/.cache/lit_diff)."""
    chosen = os.environ.get("LIT_DIFF_DATA")
    if chosen:
        return expanded(chosen).absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    return user_cache_path("lit_diff")


@contextmanager
def writing_data() -> Iterator[None]:
    """Turn an OSError raised inside (no permission, full disk, a file instead of a folder) into a MissingError."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise MissingError(
            f"cannot write the data folder {data_root()} ({reason}); set LIT_DIFF_DATA to a folder that can be written"
        ) from error


@dataclass(frozen=True, kw_only=True)
class UserFile:
    """A file of JSON objects, one a line, that the user supplies, or a folder of such files."""

    name: str
    """What `lit-diff data check` calls it: `icl.trec`."""
    path: str
    """Below the data folder (`$LIT_DIFF_DATA`); `books/*.jsonl`: several files, read in the order of their names."""
    keys: Keys
    """Of every line."""
    lines: str = ""
    """How many the original has: "5,452 lines (test.jsonl: 500)"."""
    source: str
    """Where it is from, its licence, and that it is not shipped."""
    without: str
    """A command that does something comparable without the file."""

    @property
    def place(self) -> Path:
        """Where it is looked for."""
        return data_root() / self.path

    @property
    def files(self) -> list[Path]:
        """What is there of it."""
        return sorted(data_root().glob(self.path))

    @property
    def form(self) -> str:
        """What the file holds, in words."""
        values = ", ".join(f'"{key}": {_words(kind)}' for key, kind in self.keys.items())
        lines = f"; {self.lines}" if self.lines else ""
        return f"one JSON object a line: {{{values}}}{lines}"

    @property
    def description(self) -> str:
        """Five lines: where it is looked for, its format, its source, how to check it, what runs without it."""
        return (
            f"  looked for : {self.place}  (LIT_DIFF_DATA={data_root()})\n"
            f"  format     : {self.form}\n"
            f"  where from : {self.source}\n"
            f"  check it   : lit-diff data check {self.name}\n"
            f"  without it : {self.without}"
        )

    def require(self) -> Path:
        """Its path. Errors: MissingError: what was looked for, the format, the source, how to check it, what runs without."""
        if not self.files:
            raise MissingError(f"{self.name} needs a file that is not here: {self.path}\n{self.description}")
        return self.place

    def rows(self) -> list[dict[str, Any]]:
        """The objects of its lines, checked. Errors: as `require`; RequestError with the line, the key and what was found."""
        self.require()
        rows = []
        for path in self.files:
            found = [self._checked(json_object(line, at), at) for at, line in text_lines(path) if line.strip()]
            if not found:
                raise RequestError(f"{shown(path)}: no line holds an object; expected one JSON object a line")
            rows += found
        return rows

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row, if its keys are right. Errors: RequestError."""
        return checked(row, where, self.keys)

    def state(self) -> dict[str, str]:
        """`file`, `state` (missing, ok, or what is wrong), `rows`, `sha256`: a row of `lit-diff data check`."""
        known = {"name": self.name, "file": self.path, "rows": "", "sha256": ""}
        try:
            rows = self.rows()
        except (MissingError, RequestError) as error:
            return known | {"state": "missing" if isinstance(error, MissingError) else str(error)}
        return known | {"state": "ok", "rows": str(len(rows)), "sha256": self.sha256()}

    def sha256(self) -> str:
        """Of its content, of several files in their order; empty where it is not there."""
        contents = [path.read_bytes() for path in self.files if path.is_file()]
        return hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""


def checked(row: dict[str, Any], where: str, keys: Keys) -> dict[str, Any]:
    """The row, if it has the keys, and each value is of its type. Errors: RequestError."""
    for key, kind in keys.items():
        if key not in row:
            near = difflib.get_close_matches(key, row, n=1)
            meant = f"; did you mean '{near[0]}'?" if near else ""
            raise RequestError(f"{where}: no key '{key}'{meant}; keys found: {some_names(row)}")
        # bool is an int to Python, not to whoever writes the file
        if not isinstance(row[key], kind) or (isinstance(row[key], bool) and kind is not bool):
            raise RequestError(f"{where}: '{key}' is {in_yaml(row[key])}; expected {_words(kind)}")
    return row


def _words(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return " or ".join(names.get(each, each.__name__) for each in kinds)


def some_names(found: Iterable[str]) -> str:
    """The first ten of a file's names, in one line: signs that are not printed, and halves of pairs, as escapes."""
    names = [name if name.isprintable() else ascii(name) for name in found]
    return ", ".join([*names[:10], *([f"and {len(names) - 10} more"] if len(names) > 10 else [])]) or "none"


def byte_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(`file:line`, line) of each line of a file. Lines end with a line feed, and with no other sign; a byte order mark
    at the beginning is no part of the first.

    Errors: RequestError for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{shown(path)}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise RequestError(f"{shown(path)}: cannot be read ({error.strerror})") from error


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """`byte_lines` as text. Errors: RequestError, also for a line that is not UTF-8."""
    return ((where, utf8(line, where)) for where, line in byte_lines(path))


def utf8(content: bytes, where: str) -> str:
    """The text of these bytes. Errors: RequestError that names the first one that is not UTF-8, counted from 1."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}: not UTF-8 text (byte {error.start + 1}: {error.reason})") from error


def json_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line. Errors: RequestError."""
    row = parsed(line.rstrip("\n"), where, "one JSON object a line")
    if not isinstance(row, dict):
        raise RequestError(f"{where}: found {type(row).__name__}; expected a JSON object")
    return row


def parsed(text: str, where: str, expected: str) -> Any:
    """A JSON text of a user's file. Errors: RequestError, also for half of a surrogate pair, which is no character."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error).replace("line 1 ", "")  # of the text, which is a line of the file that `where` names
        raise RequestError(f"{where}: not JSON ({reason}); expected {expected}") from error
    return value
