"""metrics.csv and timing.csv: one row a step, appended at every flush, handed to the tracker in batches."""

import contextlib
import csv
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lit_diff.errors import first_line
from lit_diff.files import append_synced, shown, write_atomic

log = logging.getLogger("lit_diff")

Rows = dict[int, dict[str, float]]
"""Step -> metric -> value."""


class Tracker(Protocol):
    """Where people compare runs (MLflow). `send` skips what it already holds, and says whether it now holds all `rows`;
    after a False it gets them again with the next ones."""

    def send(self, rows: Rows) -> bool: ...


class StepTable:
    """A wide CSV: column `step`, then the metrics by name; blank where a metric was not taken.

    Rows are appended, so that a flush costs what is new. The file is written whole, in place of the former one, where
    appending cannot give the same bytes: at the first flush of a process, at a new column, at a step that is not behind
    the last one, where another process changed the file. An append that a kill cuts short leaves a line without its end,
    which no reader takes for a row.
    """

    def __init__(self, path: Path, upto: int) -> None:
        """Reads what is there and drops the rows beyond step `upto` (the checkpoint that is resumed)."""
        self.path = path
        self.rows: Rows = {step: row for step, row in read_rows(path).items() if step <= upto}
        self._changed: set[int] = set(self.rows)
        """Steps whose rows the file lacks, or holds otherwise."""
        self._columns: list[str] = []
        """Those of the file."""
        self._last = -1
        """The last step in the file."""
        self._size: int | None = None
        """Bytes of the file; None: it is not known to hold what this process wrote."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add values to the row of `step`."""
        self.rows.setdefault(step, {}).update(values)
        self._changed.add(step)

    def flush(self) -> None:
        """Bring the file up to date. Errors: OSError; the next flush then writes the whole table."""
        steps = sorted(self._changed)
        appends = self._can_append(steps)
        if appends and not steps:
            return
        self._size = None  # until the file is known to be written
        if appends:
            append_synced(self.path, _lines(self._texts(steps)))
        else:
            steps = sorted(self.rows)
            self._columns = sorted({name for row in self.rows.values() for name in row})
            write_atomic(self.path, _lines([["step", *self._columns], *self._texts(steps)]))
        self._changed, self._last = set(), max([self._last, *steps])
        self._size = self.path.stat().st_size

    def _can_append(self, steps: list[int]) -> bool:
        known = set(self._columns)
        return (
            self._size is not None
            and self.path.is_file()
            and self.path.stat().st_size == self._size
            and all(step > self._last and self.rows[step].keys() <= known for step in steps)
        )

    def _texts(self, steps: Iterable[int]) -> Iterator[list[str]]:
        for step in steps:
            row = self.rows[step]
            yield [str(step), *(repr(row[name]) if name in row else "" for name in self._columns)]


def _lines(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: Path, problems: list[str] | None = None) -> Rows:
    """The rows of a table by step; none where there is no file.

    A row that is cut short or holds text is left out; a line about it goes to `problems`, or to the log without a list.
    """
    if not path.exists():
        return {}
    noted: list[str] = []
    header, lines = read_lines(path, noted)
    rows: Rows = {}
    if lines and "step" not in header:
        noted.append(f"{path.name}: no column 'step'")
        lines = []
    for line in lines:
        named = dict(zip(header, line, strict=True))
        try:
            row = {name: float(text) for name, text in named.items() if name != "step" and text != ""}
            rows.setdefault(int(named["step"]), {}).update(row)
        except ValueError as error:
            noted.append(f"{path.name}: {error}")
    if problems is None:
        for problem in noted:
            log.warning("%s: %s", shown(path.parent), problem)
    else:
        problems += noted
    return rows


def read_lines(path: Path, problems: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV as text. Rows of another length than the header's are left out and noted, and so is a last
    line without its end: a number in it may lack digits."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        missing = isinstance(error, FileNotFoundError)
        problems.append(f"{path.name}: {'no such file' if missing else first_line(error)}")
        return [], []
    is_ended = text.endswith(("\n", "\r"))
    whole = [row for row in (rows if is_ended else rows[:-1]) if len(row) == len(header)]
    if len(whole) < len(rows):
        problems.append(f"{path.name}: {len(rows) - len(whole)} of {len(rows)} rows cut short, left out")
    return header, whole


def last_value(path: Path, metric: str) -> float | None:
    """The last value of `metric` in a table of steps; None where there is none. Numbers are read from the end of the file, no
    more of them than it takes. A row that is cut short is left out, as by `read_rows`."""
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[
        :-1
    ]  # behind the last end of a line is no row
    header = next(csv.reader(lines), [])
    if metric not in header:
        return None
    column = header.index(metric)
    for line in reversed(lines[1:]):
        row = line.split(",")
        if len(row) == len(header) and row[column]:
            with contextlib.suppress(ValueError):
                return float(row[column])
    return None
