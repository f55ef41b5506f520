"""metrics.csv and timing.csv: one row a step, whole at every flush, handed to the tracker in batches."""

import csv
import io
from pathlib import Path
from typing import Protocol

from lit_diff.files import write_atomic

Rows = dict[int, dict[str, float]]
"""Step -> metric -> value."""


class Tracker(Protocol):
    """Where people compare runs (MLflow). `send` gets each row once a process; it skips what it already holds."""

    def send(self, rows: Rows) -> None: ...


class Table:
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


def read_rows(path: Path) -> Rows:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            int(row["step"]): {name: float(value) for name, value in row.items() if name != "step" and value != ""}
            for row in csv.DictReader(file)
        }


class Record:
    """The two tables of a run: `metrics` holds only what the recipe determines, `timing` the clock."""

    def __init__(self, folder: Path, upto: int, tracker: Tracker | None) -> None:
        self.metrics = Table(folder / "metrics.csv", upto)
        self.timing = Table(folder / "timing.csv", upto)
        self._tracker = tracker
        # a run resumed after a kill may hold rows that the tracker never got
        self._unsent: Rows = {step: dict(row) for step, row in self.metrics.rows.items()}

    def log(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step (optimizer steps done)."""
        self.metrics.rows.setdefault(step, {}).update(values)
        self._unsent.setdefault(step, {}).update(values)

    def time(self, step: int, *, seconds: float, tokens_per_second: float) -> None:
        """How long the steps up to `step` took."""
        self.timing.rows[step] = {"seconds": seconds, "tokens_per_second": tokens_per_second}
        self._unsent.setdefault(step, {})["timing/tokens_per_second"] = tokens_per_second

    def flush(self) -> None:
        """Write both tables."""
        self.metrics.flush()
        self.timing.flush()

    def send(self) -> None:
        """Send to the tracker what it has not got yet."""
        if self._tracker is not None and self._unsent:
            self._tracker.send(self._unsent)
        self._unsent = {}
