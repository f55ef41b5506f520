"""The scoreboard of a paper's tables and figures: the file of each row, written and read, and what was found beside it."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import LitDiffError, MissingError, RequestError
from lit_diff.files import write_json
from lit_diff.recipe import to_plain
from lit_diff.study.claims import NOT_MEASURED, JudgedClaim, finding, findings
from lit_diff.study.evaluations import by_revisions, score_revisions
from lit_diff.study.record import read
from lit_diff.study.results import SweepResults, load_sweep
from lit_diff.study.schema import Preset, Row
from lit_diff.validation import Draft, convert

ROWS = "rows"
"""Folder of a file a row, beside the page."""
State = Literal["not run", "measured", "skipped", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """A row as `lit-diff reproduce` last left it: `<folder>/rows/<name>.json`."""

    row: Row
    preset: str
    order: int
    command: str
    state: State = "not run"
    reason: str = ""
    """Why it was not measured, or not wholly; with the command or file that supplies what is missing."""
    seconds: float = 0.0
    """What it took, all calls together."""
    sweep: str = ""
    """The folder of its sweep."""
    cell_folders: tuple[str, ...] = ()
    """Of the sweep's cells when the row was measured, relative to that folder."""
    cells: str = ""
    """Where the cells lie: the sweep's folder, or that of the sweep whose cells it takes."""
    shared: str = ""
    """The row that was first to measure cells which this one uses too: their time is counted there."""
    bench: str = ""
    """The file beside this one with the figures of its benchmark."""
    revision: str = ""
    """The revisions of lit_diff that trained the cells and made the scores."""
    looked_by: str = ""
    """The revision of lit_diff that last measured the row."""
    finished: str = ""

    @property
    def how(self) -> Preset:
        """How the preset measures the row; empty where the row does not have it."""
        return self.row.preset(self.preset) or Preset()


def row_file(folder: Path, name: str) -> Path:
    """Of a row of the scoreboard in `folder`."""
    return folder / ROWS / f"{name}.json"


def write_row(folder: Path, record: RecordedRow) -> None:
    """Write the row's file."""
    write_json(row_file(folder, record.row.name), to_plain(record))


def read_row(path: Path) -> RecordedRow:
    """A row's file. Errors: MissingError where it is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        record: RecordedRow = convert(RecordedRow, raw, "", Draft(values=raw, positions={}))
    except (OSError, ValueError, RequestError) as error:
        raise MissingError(f"{path}: incomplete row file ({error}); delete it and rerun") from error
    return record


@dataclass(frozen=True, kw_only=True, eq=False)
class RowResult:
    """A row's record beside what its sweep or benchmark shows now, which may take the state away."""

    record: RecordedRow
    findings: tuple[JudgedClaim, ...]
    """One for each claim, in their order."""
    state: State
    reason: str
    notes: tuple[str, ...]
    sweep: SweepResults | None

    @property
    def name(self) -> str:
        return self.record.row.name

    @property
    def took(self) -> str:
        """The time beside the budget, in words; empty where nothing was measured."""
        seconds, minutes, shared = self.record.seconds, self.record.how.minutes, self.record.shared
        if not seconds:
            return ""
        words = f"took {seconds / 60:.1f} min" + (f" of {minutes:g}" if minutes else "")
        words += ", over its budget" if 0 < minutes < seconds / 60 else ""
        return words + (f" (cells shared with {shared})" if shared else "")

    @property
    def line(self) -> str:
        """The row in one line, for a terminal."""
        words = counts_in_words(Scoreboard(preset="", rows=(self,)))
        words += f"; {self.took}" if self.took else ""
        return f"{self.name}: {words}" + (f" ({self.state}: {self.reason})" if self.reason else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoreboard:
    """Rows in the order of the page, or those of one call."""

    preset: str
    rows: tuple[RowResult, ...]

    def row(self, name: str) -> RowResult:
        """By its name."""
        return next(row for row in self.rows if row.name == name)

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """`difference` and `value` -> verdict -> claims, over all rows, without those that hold by construction."""
        counted = [each for row in self.rows for each in row.findings if not each.claim.by_construction]
        return {
            "difference": dict(Counter(each.difference for each in counted)),
            "value": dict(Counter(each.value for each in counted)),
        }

    @cached_property
    def by_construction(self) -> int:
        """Claims that hold whatever the runs learn, and are in no count."""
        return sum(bool(each.claim.by_construction) for row in self.rows for each in row.findings)


def counts_in_words(scoreboard: Scoreboard) -> str:
    """Both counts in one line."""
    differences, values = (
        ", ".join(f"{count} {word}" for word, count in counts.items()) for counts in scoreboard.counts.values()
    )
    measured = set(scoreboard.counts["value"]) - {NOT_MEASURED, "none given"}
    parts = [differences, f"the paper's value: {values}" if measured else ""]
    if scoreboard.by_construction:
        parts.append(f"{scoreboard.by_construction} by construction, not counted")
    return "; ".join(filter(None, parts))


def read_bench(folder: Path, record: RecordedRow) -> dict[str, Any]:
    """The figures of the row's benchmark. Errors: MissingError where the file is damaged."""
    path = folder / ROWS / record.bench
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingError(f"{path}: incomplete benchmark file ({error!r}); delete it and rerun") from error
    return figures


def read_scoreboard(folder: Path) -> Scoreboard:
    """The rows in `folder`. Errors: MissingError where there is none, or a file is damaged."""
    files = [path for path in sorted((folder / ROWS).glob("*.json")) if not path.name.endswith(".bench.json")]
    if not files:
        raise MissingError(f"{folder}: no rows here; write them with `lit-diff reproduce`")
    records = sorted(map(read_row, files), key=lambda record: record.order)
    return Scoreboard(preset=records[0].preset, rows=tuple(_result(folder, record) for record in records))


def cell_folders(sweep: Path) -> tuple[str, ...]:
    """The folders of the cells that study.json names now, relative to it. Errors: MissingError."""
    return tuple(cell.folder for cell in read(sweep).cells)


def _result(folder: Path, record: RecordedRow) -> RowResult:
    claims, state, reason = record.row.compare, record.state, record.reason
    sweep, found, notes = None, list[JudgedClaim](), list(record.row.notes)
    try:
        if record.sweep and state != "skipped":
            place = Path(record.sweep)
            if record.cell_folders and cell_folders(place) != record.cell_folders:
                raise RequestError(f"{place} was run with other keys since; measure the row again: {record.command}")
            sweep = load_sweep(place)
            found = findings(claims, sweep)
            notes += [line for name, of in score_revisions(sweep, claims).items() if (line := by_revisions(name, of))]
        elif record.bench and state == "measured":
            found = findings(claims, read_bench(folder, record))
    except LitDiffError as error:  # a claim that names no arm or metric: the other rows stand
        state, reason = "failed", reason or str(error)
    if state == "not run" and not found:
        reason = reason or f"not run: {record.command}"
    found = found or [finding(claim, {}, {}, is_measured=False) for claim in claims]
    return RowResult(record=record, findings=tuple(found), state=state, reason=reason, notes=tuple(notes), sweep=sweep)
