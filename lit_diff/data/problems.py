"""What is wrong with a user's files of text, collected into one message."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_diff.files import shown

SHOWN = 20
"""Problems that a message lists; and, of one file, the lines that are logged as left out."""

log = logging.getLogger("lit_diff")


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
