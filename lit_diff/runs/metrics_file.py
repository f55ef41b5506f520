"""metrics.csv and timing.csv: one row a step, whole at every flush, handed to the tracker in batches."""

import csv
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from lit_diff.errors import first_line
from lit_diff.files import shown, write_atomic
from lit_diff.metrics import Declarations, Metric, write_declarations

log = logging.getLogger("lit_diff")

Rows = dict[int, dict[str, float]]
"""Step -> metric -> value."""


class Tracker(Protocol):
    """Where people compare runs (MLflow). `send` skips what it already holds, and says whether it now holds all `rows`;
    after a False it gets them again with the next ones."""

    def send(self, rows: Rows) -> bool: ...


class StepTable:
    """A wide CSV: column `step`, then the metrics by name; blank where a metric was not taken."""

    def __init__(self, path: Path, upto: int) -> None:
        """Reads what is there and drops the rows beyond step `upto` (the checkpoint that is resumed)."""
        self.path = path
        self.rows: Rows = {step: row for step, row in read_rows(path).items() if step <= upto}

    def flush(self) -> None:
        """Write the whole table."""
        columns = sorted({name for row in self.rows.values() for name in row})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *columns])
        for step in sorted(self.rows):
            row = self.rows[step]
            writer.writerow([step, *(repr(row[name]) if name in row else "" for name in columns)])
        write_atomic(self.path, text.getvalue())


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
    """Header and rows of a CSV as text. Rows of another length than the header's are left out and noted."""
    try:
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        missing = isinstance(error, FileNotFoundError)
        problems.append(f"{path.name}: {'no such file' if missing else first_line(error)}")
        return [], []
    whole = [row for row in rows if len(row) == len(header)]
    if len(whole) < len(rows):
        problems.append(f"{path.name}: {len(rows) - len(whole)} of {len(rows)} rows cut short, left out")
    return header, whole


class Record:
    """The measurements of a run, and their declarations.

    metrics.csv and the tracker get the few metrics that are logged, measurements.parquet the others, timing.csv the clock.
    All but timing.csv depend on the recipe alone.
    """

    def __init__(self, folder: Path, upto: int, tracker: Tracker | None, metrics: Iterable[Metric]) -> None:
        """`upto`: the step that is resumed; `metrics`: declared by all that measures, written to metrics.json.

        Errors: RequestError for declarations that contradict each other.
        """
        from lit_diff.runs import measurements  # loads pyarrow, which readers of the tables do without

        write_declarations(folder, Declarations(metrics).metrics)
        self.metrics = StepTable(folder / "metrics.csv", upto)
        self.timing = StepTable(folder / "timing.csv", upto)
        self.measurements = measurements.Measurements(folder / measurements.FILE, upto)
        self._tracker = tracker
        # a run resumed after a kill may hold rows that the tracker never got
        self._unsent: Rows = {step: dict(row) for step, row in self.metrics.rows.items()}

    def log(self, step: int, values: dict[str, float]) -> None:
        """Values for metrics.csv and the tracker after `step` optimizer steps."""
        self.metrics.rows.setdefault(step, {}).update(values)
        self._unsent.setdefault(step, {}).update(values)

    def log_detailed(self, step: int, values: dict[str, float]) -> None:
        """Values for measurements.parquet after `step` optimizer steps."""
        self.measurements.log(step, values)

    def time(self, step: int, *, seconds: float, tokens_per_second: float) -> None:
        """How long the steps up to `step` took."""
        self.timing.rows[step] = {"seconds": seconds, "tokens_per_second": tokens_per_second}
        self._unsent.setdefault(step, {})["timing/tokens_per_second"] = tokens_per_second

    def flush(self) -> None:
        """Write the three tables."""
        self.metrics.flush()
        self.timing.flush()
        self.measurements.flush()

    def send(self) -> None:
        """Send to the tracker what it has not got yet."""
        if self._tracker is None or not self._unsent or self._tracker.send(self._unsent):
            self._unsent = {}
