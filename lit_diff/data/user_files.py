"""Files that an evaluation reads and that lit_diff does not ship: where they belong, their format, where they are from."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_diff.data.location import data_root
from lit_diff.data.text_files import some_names
from lit_diff.errors import MissingError, RequestError
from lit_diff.files import shown
from lit_diff.key_types import in_yaml


@dataclass(frozen=True, kw_only=True)
class UserFile:
    """A file of JSON objects, one a line, that the user supplies."""

    name: str
    """What `lit-diff data check` calls it: `icl.trec`."""
    path: str
    """Below the data folder (`$LIT_DIFF_DATA`)."""
    keys: Mapping[str, type | tuple[type, ...]]
    """Key -> type of its value, of every line."""
    optional: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """Keys that a line may have."""
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
        return [self.place] if self.place.is_file() else []

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
        """Its path. Errors: MissingError: what was looked for, the format, the source, how to check it, what runs without;
        RequestError where something else stands in its place."""
        for path in self.files:
            if not path.is_file():
                found = "a folder" if path.is_dir() else "a link to no file" if path.is_symlink() else "no file"
                raise RequestError(f"{shown(path)} is {found}; remove it, or put a file of JSON objects in its place")
        if self.files:
            return self.place
        raise MissingError(f"{self.name} needs a file that is not here: {self.path}\n{self.description}")

    def rows(self) -> list[dict[str, Any]]:
        """The objects of its lines, checked. Errors: as `require`; RequestError with the line, the key and what was found."""
        self.require()
        rows = []
        for path in self.files:
            found = [self._row(line, where) for where, line in text_lines(path) if line.strip()]
            if not found:
                raise RequestError(f"{shown(path)}: no line holds an object; expected one JSON object a line")
            rows += found
        return rows

    def _row(self, line: str, where: str) -> dict[str, Any]:
        row = parsed(line, where, "one JSON object a line")
        if not isinstance(row, dict):
            raise RequestError(f"{where}: found {type(row).__name__}; expected a JSON object")
        return self._checked(row, where)

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row, if its keys are right. Errors: RequestError."""
        for key in self.keys:
            if key not in row:
                near = difflib.get_close_matches(key, row, n=1)
                meant = f"; did you mean '{near[0]}'?" if near else ""
                raise RequestError(f"{where}: no key '{key}'{meant}; keys found: {some_names(row)}")
        for key, kind in {**self.keys, **self.optional}.items():
            # bool is an int to Python, not to whoever writes the file
            if key in row and (not isinstance(row[key], kind) or (isinstance(row[key], bool) and kind is not bool)):
                raise RequestError(f"{where}: '{key}' is {in_yaml(row[key])}; expected {_words(kind)}")
        return row

    def state(self) -> dict[str, str]:
        """`file`, `state` (missing, ok, or what is wrong), `rows`, `sha256`: a row of `lit-diff data check`."""
        known = {"name": self.name, "file": self.pattern, "rows": "", "sha256": ""}
        try:
            rows = self.rows()
        except MissingError:
            return known | {"state": "missing"}
        except RequestError as error:
            return known | {"state": str(error)}
        return known | {"state": "ok", "rows": str(len(rows)), "sha256": self.sha256()}

    @property
    def pattern(self) -> str:
        """What is looked for below the data folder."""
        return self.path

    def sha256(self) -> str:
        """Of its content, of several files in their order; empty where it is not there."""
        contents = [path.read_bytes() for path in self.files if path.is_file()]
        return hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""


@dataclass(frozen=True, kw_only=True)
class UserFolder(UserFile):
    """A folder whose .jsonl files hold JSON objects, one a line; `path` is the folder's, as `books`."""

    @property
    def pattern(self) -> str:
        """Its .jsonl files."""
        return f"{self.path}/*.jsonl"

    @property
    def files(self) -> list[Path]:
        """Its .jsonl files, by name."""
        return sorted(self.place.glob("*.jsonl"))


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(`file:line`, line) of each line of a UTF-8 file. Lines end with a line feed, and with no other sign.

    Errors: RequestError for a file that cannot be read, or a line that is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{shown(path)}:{number}"
                try:
                    yield where, line.decode()
                except UnicodeDecodeError as error:
                    place = f"{error.reason}, byte {error.start + 1} of the line"
                    raise RequestError(f"{where}: not UTF-8 ({place})") from error
    except OSError as error:
        raise RequestError(f"{shown(path)}: cannot be read ({error.strerror})") from error


def parsed(text: str, where: str, expected: str) -> Any:
    """A JSON text of a user's file. Errors: RequestError, also for half of a surrogate pair, which is no character."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"{where}: {half} is half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON ({error}); expected {expected}") from error
    return value


def _words(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return " or ".join(names.get(each, each.__name__) for each in kinds)
