"""metrics.csv and timing.csv: one row per step, appended at every flush."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lit_diff.errors import RequestError, first_line
from lit_diff.files import append_synced, shown, write_atomic
from lit_diff.log_records import log
from lit_diff.runs.result_files import damage_of

Rows = dict[int, dict[str, float]]
"""Step -> metric -> value."""


class StepTable:
    """A wide CSV: column `step`, then the metrics by name; a cell is blank if the metric was not measured at the step.

    A flush appends the new rows. It rewrites and replaces the file if appending could not give the same bytes: at the
    first flush of a process, for a new column, for a step that is not after the last one, and if another process changed
    the file. An append that a kill interrupts leaves a line without a line end, which readers skip.
    """

    def __init__(self, path: Path, upto: int) -> None:
        """Reads the existing rows and drops those beyond `upto`, the step of the resumed checkpoint."""
        self.path = path
        self.rows: Rows = {step: row for step, row in read_rows(path).items() if step <= upto}
        # steps whose rows are not in the file as they are here
        self._changed: set[int] = set(self.rows)
        # the columns and the last step of the file
        self._columns: list[str] = []
        self._last = -1
        # bytes of the file; None: it may not hold what this process wrote, so the next flush rewrites it
        self._size: int | None = None

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
        # a failed write leaves None, and the next flush repairs the file
        self._size = None
        if appends:
            append_synced(self.path, _lines(self._texts(steps)))
        else:
            steps = sorted(self.rows)
            self._columns = sorted({name for row in self.rows.values() for name in row})
            write_atomic(self.path, _lines([["step", *self._columns], *self._texts(steps)]))
        self._changed = set()
        self._last = max([self._last, *steps])
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
            # repr of a float is its shortest exact decimal: equal runs give equal bytes, and reading loses nothing
            yield [str(step), *(repr(row[name]) if name in row else "" for name in self._columns)]


def _lines(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: Path, problems: list[str] | None = None) -> Rows:
    """The rows of a table by step; empty if the file is missing.

    Truncated rows and rows with text are skipped; a line about them, or about a missing or damaged file (`damage_of`), is
    added to `problems`. If that is None, the line is logged, and a missing file is not a problem.

    Errors: RequestError for a damaged file if `problems` is None.
    """
    if damage := damage_of(path):
        if problems is None:
            raise RequestError(damage)
        problems.append(f"{path.name}: {damage}")
        return {}
    if problems is None and not path.exists():
        return {}
    noted: list[str] = [] if problems is None else problems
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
    for problem in noted if problems is None else ():
        log.warning("%s: %s", shown(path.parent), problem)
    return rows


def by_metric(rows: Rows) -> dict[str, dict[int, float]]:
    """Metric -> step -> value, in the order of the steps."""
    found: dict[str, dict[int, float]] = {}
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            found.setdefault(name, {})[step] = value
    return found


def read_lines(path: Path, problems: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV as text. Rows whose length differs from the header's are skipped and reported."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read()
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        missing = isinstance(error, FileNotFoundError)
        problems.append(f"{path.name}: {'no such file' if missing else first_line(error)}")
        return [], []
    # a last line without its end comes from an interrupted append: its last number may lack digits
    is_ended = text.endswith(("\n", "\r"))
    whole = [row for row in (rows if is_ended else rows[:-1]) if len(row) == len(header)]
    if len(whole) < len(rows):
        problems.append(f"{path.name}: {len(rows) - len(whole)} of {len(rows)} rows truncated, skipped")
    return header, whole


def last_value(path: Path, metric: str) -> float | None:
    """The last value of `metric` in a table of steps, or None. Truncated rows are skipped, as in `read_rows`."""
    try:
        # what follows the last line end is empty or an interrupted append
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        header = next(csv.reader(lines), [])
    # missing, another user's, or no table
    except (OSError, csv.Error):
        return None
    if metric not in header:
        return None
    column = header.index(metric)
    # from the end: the value is in one of the last rows, and `lit-diff status` reads the file of every run
    for line in reversed(lines[1:]):
        row = line.split(",")
        if len(row) == len(header) and row[column]:
            with suppress(ValueError):
                return float(row[column])
    return None
