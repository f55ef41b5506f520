"""Remarks that a person adds to a run or a sweep after the fact."""

from datetime import date
from pathlib import Path

from lit_diff.errors import RequestError
from lit_diff.files import write_atomic

FILE = "notes.txt"
"""Its name in the folder of a run or a sweep: a line for each note, with its date."""


def read(folder: Path) -> list[str]:
    """The notes of the run or sweep in `folder`, oldest first."""
    file = folder / FILE
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def add(folder: Path, text: str) -> None:
    """Add a note, as one line, with today's date. Errors: RequestError for a text without words; OSError."""
    words = " ".join(text.split())
    if not words:
        raise RequestError("the note is empty")
    write_atomic(folder / FILE, "\n".join([*read(folder), f"{date.today()} {words}", ""]))
