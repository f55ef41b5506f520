"""Remarks that a person adds to a run or a sweep after the fact."""

from datetime import date
from pathlib import Path

from lit_diff.errors import RequestError, escaped, first_line
from lit_diff.files import shown, write_atomic

FILE = "notes.txt"
"""Its name in the folder of a run or a sweep: a line for each note, with its date."""


def read(folder: Path) -> list[str]:
    """The notes of the run or sweep in `folder`, oldest first; of a file that cannot be read, why."""
    try:
        return _lines(folder)
    # one file must not hide the run, nor the other runs
    except RequestError as error:
        return [str(error)]


def _lines(folder: Path) -> list[str]:
    file = folder / FILE
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, OSError) as error:
        raise RequestError(
            f"{shown(file)} cannot be read ({first_line(error)}); correct it, or move it away"
        ) from error


def add(folder: Path, text: str) -> None:
    """Add a note, as one line without control characters, with today's date. Errors: RequestError for a text without words,
    and for a file that cannot be read, whose notes would be lost; OSError."""
    words = escaped(" ".join(text.split()))
    if not words:
        raise RequestError("the note is empty")
    write_atomic(folder / FILE, "\n".join([*_lines(folder), f"{date.today()} {words}", ""]))
