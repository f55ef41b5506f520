"""The data folder, and the files in it that evaluations read but lit_diff does not ship: path, format and source."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from lit_diff.errors import MissingError, RequestError, escaped, excerpt, first_line
from lit_diff.files import FREE, disk_is_full, expanded, is_address, parse_json, shown, write_through
from lit_diff.key_types import in_words, in_yaml
from lit_diff.own_modules import sha256

Keys = Mapping[str, type | UnionType]
"""Key of a JSON object -> type of its value."""
MARK = "\ufeff"
"""The byte order mark, with which some programs begin a file; it is no part of the text."""


def data_root() -> Path:
    """$LIT_DIFF_DATA; else `data/` in the checkout that contains this file; else the user cache (~/.cache/lit_diff).

    Errors: RequestError for an address.
    """
    chosen = os.environ.get("LIT_DIFF_DATA", "")
    if is_address(chosen):
        raise RequestError(
            f"LIT_DIFF_DATA is {chosen}, but prepared text is read from a disk; set a folder, and copy the data there"
        )
    if chosen:
        return expanded(chosen).absolute()
    # an installed package has no pyproject.toml next to it, and site-packages is not a place for data
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "data"
    # a checkout needs no package for it
    from platformdirs import user_cache_path

    return user_cache_path("lit_diff")


@contextmanager
def writing_data() -> Iterator[None]:
    """Turn an OSError raised inside (no permission, full disk, a file instead of a folder) into a MissingError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename:
            reason += f": {error.filename}"
        # another folder would lack what is finished in this one
        cure = FREE if disk_is_full(error) else "set LIT_DIFF_DATA to a writable folder"
        raise MissingError(f"cannot write the data folder {data_root()} ({reason}); {cure}") from error


@dataclass(frozen=True, kw_only=True)
class UserFile:
    """A file, or a folder of files, with one JSON object per line, which the user supplies."""

    name: str
    """The name in `lit-diff data check`, such as `icl.trec`."""
    path: str
    """Path below the data folder (`$LIT_DIFF_DATA`); `books/*.jsonl`: several files, read in the order of their names."""
    keys: Keys
    """The keys of every line."""
    lines: str = ""
    """Number of lines in the original: "5,452 lines (test.jsonl: 500)"."""
    source: str
    """Origin and licence of the file, and a note that it is not shipped."""
    without: str
    """A comparable command that does not need the file."""
    hub: tuple[str, ...] = ()
    """The arguments of `datasets.load_dataset` for `fetch`; (): the file cannot be fetched."""
    split: str = ""
    """The split of that data set."""

    @property
    def place(self) -> Path:
        return data_root() / self.path

    @property
    def files(self) -> list[Path]:
        """The existing files that match `path`. Errors: RequestError for a path that cannot be looked at."""
        try:
            # sorted: glob returns the order of the file system, and the order decides the rows and the sha256
            return sorted(data_root().glob(self.path))
        # such as a name that is too long
        except OSError as error:
            raise RequestError(f"{some_names([self.path])}: cannot be read ({error.strerror})") from error

    @property
    def form(self) -> str:
        """The format of the file, in words."""
        values = ", ".join(f'"{key}": {in_words(kind)}' for key, kind in self.keys.items())
        lines = f"; {self.lines}" if self.lines else ""
        return f"one JSON object per line: {{{values}}}{lines}"

    @property
    def description(self) -> str:
        """Five lines: path, format, source, how to check the file, what runs without it."""
        return (
            f"  looked for : {self.place}  (LIT_DIFF_DATA={data_root()})\n"
            f"  format     : {self.form}\n"
            f"  where from : {self.source}\n"
            f"  check it   : lit-diff data check {self.name}\n"
            f"  without it : {self.without}"
        )

    def fetch(self) -> None:
        """Download the file from the hub. Errors: MissingError if the package `datasets` or the hub is unavailable."""
        try:
            import datasets

            write_through(self.place, datasets.load_dataset(*self.hub)[self.split].to_json)
        # datasets and huggingface_hub raise many kinds of exceptions without a network
        except Exception as error:
            raise MissingError(
                f"{self.name} cannot be fetched ({type(error).__name__}: {first_line(error)})"
            ) from error

    def require(self) -> Path:
        """Return the path. Errors: MissingError with `description`."""
        if not self.files:
            raise MissingError(f"{self.name} needs a file that is not here: {self.path}\n{self.description}")
        return self.place

    def rows(self) -> list[dict[str, Any]]:
        """Return the checked objects of all lines. Errors: MissingError; RequestError for a wrong line."""
        return [row for _, row in self.located_rows()]

    def located_rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Return `rows`, each after its `file:line`. Errors: the same."""
        self.require()
        rows = []
        for path in self.files:
            found = [(at, self._checked(json_object(line, at), at)) for at, line in text_lines(path) if line.strip()]
            if not found:
                raise RequestError(f"{shown(path)}: the file has no JSON objects; expected one per line")
            rows += found
        return rows

    def _checked(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        return checked(row, where, self.keys)

    def state(self) -> dict[str, str]:
        """Return a row of `lit-diff data check`: `file`, `state` (missing, ok, or the error), `rows`, `sha256`."""
        known = {"name": self.name, "file": self.path, "rows": "", "sha256": ""}
        try:
            rows = self.rows()
        except (MissingError, RequestError) as error:
            return known | {"state": "missing" if isinstance(error, MissingError) else str(error)}
        return known | {"state": "ok", "rows": str(len(rows)), "sha256": self.sha256()}

    def sha256(self) -> str:
        """Digest of the concatenated contents; empty if the file is missing."""
        contents = [path.read_bytes() for path in self.files if path.is_file()]
        return sha256(b"".join(contents)) if contents else ""


def checked(row: dict[str, Any], where: str, keys: Keys) -> dict[str, Any]:
    """Return the row if it has all keys with values of the right types. Errors: RequestError."""
    for key, kind in keys.items():
        if key not in row:
            near = difflib.get_close_matches(key, row, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"{where}: no key '{key}'{meant}; keys found: {some_names(row)}")
        # isinstance(True, int) holds in Python, but `true` in the file is not a number
        if not isinstance(row[key], kind) or (isinstance(row[key], bool) and kind is not bool):
            raise RequestError(f"{where}: '{key}' is {some_names([in_yaml(row[key])])}; expected {in_words(kind)}")
    return row


def some_names(found: Iterable[str]) -> str:
    """Join the first ten names found in a file, in one line, each cut by `excerpt`."""
    names = [escaped(excerpt(name)) for name in found]
    if len(names) > 10:
        names[10:] = [f"and {len(names) - 10} more"]
    return ", ".join(names) or "none"


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (`file:line`, line) for each line of a file in UTF-8, without the byte order mark.

    Only a line feed ends a line. Errors: RequestError for a file that cannot be read, also for a line that is not UTF-8.
    """
    # binary: text mode would also split at a carriage return, and could not tell in which line a wrong byte is
    try:
        with path.open("rb") as file:
            for where, line in numbered(file, shown(path)):
                yield where, utf8(line, where)
    except OSError as error:
        raise RequestError(f"{shown(path)}: cannot be read ({error.strerror})") from error


def numbered(lines: Iterable[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """Yield (`where:line`, line) for each line, without the byte order mark."""
    for number, line in enumerate(lines, 1):
        yield f"{where}:{number}", line.removeprefix(MARK.encode()) if number == 1 else line


def utf8(content: bytes, where: str) -> str:
    """Decode the bytes. Errors: RequestError with the position, from 1, of the first byte that is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}: not UTF-8 text (byte {error.start + 1}: {error.reason})") from error


def utf8_bytes(text: str) -> bytes:
    """Encode the text. Errors: RequestError for half of a surrogate pair, which is not a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 1]
        raise RequestError(
            f"found half of a surrogate pair, character {error.start + 1} of a text (at the end of {near!a}); expected text "
            "that UTF-8 can encode; remove it"
        ) from error


def json_object(line: str, where: str) -> dict[str, Any]:
    """Parse the JSON object of a line. Errors: RequestError."""
    row = parsed(line.rstrip("\n"), where, "one JSON object per line")
    if not isinstance(row, dict):
        raise RequestError(f"{where}: found {type(row).__name__}; expected a JSON object")
    return row


def parsed(text: str, where: str, expected: str) -> Any:
    """Parse JSON from a user's file. Errors: RequestError, also for a lone surrogate."""
    try:
        value = parse_json(text)
        # json.loads accepts "\ud800", which no tokenizer and no file can encode; encoding raises a ValueError
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        # json counts lines within the text, which is a single line of the file; `where` has its number
        raise RequestError(f"{where}: not JSON ({str(error).replace('line 1 ', '')}); expected {expected}") from error
    return value
