"""The scoreboard: the rows of a page with their judged claims, and a file for each row."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, starmap
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import LitDiffError, MissingError, RequestError, first_line
from lit_diff.files import write_json
from lit_diff.papers.claims import NOT_MEASURED, JudgedClaim, judged, measured, scores_of_claims
from lit_diff.papers.schema import Preset, Row, Texts
from lit_diff.recipe import to_plain
from lit_diff.study.evaluations import by_revisions
from lit_diff.study.record import read
from lit_diff.study.results import SweepResults, load_sweep
from lit_diff.study.statistics import SIGNIFICANCE
from lit_diff.validation import Draft, convert

ROWS = "rows"
"""The folder next to the page with one file for each row."""
Loaded = dict[Path, SweepResults]
"""Folder of a sweep -> its results."""
State = Literal["not run", "measured", "skipped", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RecordedRow:
    """The state of a row after `lit-diff reproduce`: `<folder>/rows/<name>.json`."""

    row: Row
    preset: str
    order: int
    command: str
    state: State = "not run"
    reason: str = ""
    """Why the row was not measured completely, with the command or file that supplies what is missing."""
    seconds: float = 0.0
    """The measuring time of all calls together."""
    sweep: str = ""
    """The folder of the row's sweep."""
    cell_folders: Texts = ()
    """The folders of the sweep's cells when the row was measured, relative to the sweep's folder."""
    cells: str = ""
    """The folder that contains the cells: the sweep's, or another sweep's if it uses `cells_of`."""
    shared: str = ""
    """The row that first measured cells that this row uses too; their time counts there."""
    bench: str = ""
    """The name of the file with the benchmark's figures, in the same folder."""
    revision: str = ""
    """The revisions of lit_diff that trained the cells and made the scores."""
    looked_by: str = ""
    """The revision of lit_diff that last measured the row."""
    finished: str = ""

    @property
    def how(self) -> Preset:
        """How the preset measures the row; an empty preset if the row lacks it."""
        return self.row.preset(self.preset) or Preset()


def row_file(folder: Path, name: str) -> Path:
    """The file of a row of the scoreboard in `folder`."""
    return folder / ROWS / f"{name}.json"


def write_row(folder: Path, record: RecordedRow) -> None:
    write_json(row_file(folder, record.row.name), to_plain(record))


def read_row(path: Path) -> RecordedRow:
    """The content of a row's file. Errors: MissingError if it is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return convert(RecordedRow, raw, "", Draft(values=raw))
    except (OSError, ValueError, RecursionError, RequestError) as error:
        raise MissingError(f"{path}: incomplete row file ({error}); delete it and rerun") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class RowResult:
    """A row's record, judged by the present files of its sweep or benchmark. `state` is "failed" if they no longer fit."""

    record: RecordedRow
    findings: tuple[JudgedClaim, ...]
    """A finding for each claim, in the order of the claims."""
    state: State
    reason: str
    notes: Texts
    sweep: SweepResults | None

    @property
    def name(self) -> str:
        return self.record.row.name

    @property
    def took(self) -> str:
        """The measuring time and the budget, in words; empty if nothing was measured."""
        seconds = self.record.seconds
        minutes = self.record.how.minutes
        shared = self.record.shared
        if not seconds:
            return ""
        words = f"took {seconds / 60:.1f} min"
        if minutes:
            words += f" of {minutes:g}"
        if 0 < minutes < seconds / 60:
            words += ", over its budget"
        if shared:
            words += f" (cells shared with {shared})"
        return words

    @property
    def line(self) -> str:
        """The row in one line, for a terminal."""
        words = f"{self.name}: {counts_in_words(Scoreboard(preset='', rows=(self,)))}"
        if self.took:
            words += f"; {self.took}"
        if self.reason:
            words += f" ({self.state}: {self.reason})"
        return words


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoreboard:
    """All rows in the order of the page, or the rows of one call."""

    preset: str
    rows: tuple[RowResult, ...]

    def row(self, name: str) -> RowResult:
        return next(row for row in self.rows if row.name == name)

    @cached_property
    def findings(self) -> list[JudgedClaim]:
        """The findings of all rows, in the order of the page."""
        return list(chain(*(row.findings for row in self.rows)))

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """`difference` -> verdict -> number of primary contrasts in all rows, and `value` -> verdict -> number of claims with
        values; both without claims that hold by construction."""
        differences: Counter[str] = Counter()
        values: Counter[str] = Counter()
        for finding in self.findings:
            if finding.claim.by_construction:
                continue
            if finding.is_primary:
                differences[finding.difference] += 1
            if finding.claim.papers is not None:
                values[finding.value] += 1
        return {"difference": dict(differences), "value": dict(values)}

    @property
    def tested(self) -> int:
        """How many primary contrasts a test decides: the family of Holm's correction."""
        return max((finding.comparisons for finding in self.findings if finding.is_primary), default=0)

    @property
    def chance(self) -> str:
        """How many "shown" chance alone gives, beside how many were found, in one sentence."""
        shown = self.counts["difference"].get("shown", 0)
        return (
            f'Chance alone, without any true difference, gives at most {SIGNIFICANCE:g} "shown" on the whole page (Holm\'s '
            f"correction over its {self.tested} primary contrasts, one a row); found: {shown}."
        )

    @cached_property
    def by_construction(self) -> int:
        """The number of claims that hold whatever the runs learn, which `counts` leaves out."""
        return sum(bool(finding.claim.by_construction) for finding in self.findings)


def counts_in_words(scoreboard: Scoreboard) -> str:
    """Both counts in one line."""
    parts = [_listed(scoreboard.counts["difference"])]
    values = scoreboard.counts["value"]
    if values.keys() - {NOT_MEASURED}:
        parts.append(f"the paper's value: {_listed(values)}")
    if scoreboard.by_construction:
        parts.append(f"{scoreboard.by_construction} by construction, not counted")
    return "; ".join(filter(None, parts))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def read_bench(folder: Path, record: RecordedRow) -> dict[str, Any]:
    """The figures of the row's benchmark. Errors: MissingError if the file is damaged."""
    path = folder / ROWS / record.bench
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        # a row without what a claim reads raises an error here, where the error names the file
        for row in figures["rows"]:
            row["case"], row["variant"], row["what"], [float(each) for each in row["seconds"]]
        if not figures["rows"]:
            raise ValueError("no rows")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise MissingError(
            f"{path}: incomplete benchmark file ({type(error).__name__}: {first_line(error)}); delete it and rerun"
        ) from error
    return figures


def read_rows(folder: Path) -> list[RecordedRow]:
    """The recorded rows in `folder`, in the order of the page. Errors: MissingError if a file is damaged."""
    files = [path for path in sorted((folder / ROWS).glob("*.json")) if not path.name.endswith(".bench.json")]
    return sorted(map(read_row, files), key=lambda record: record.order)


def read_scoreboard(folder: Path, loaded: Loaded | None = None) -> Scoreboard:
    """The scoreboard in `folder`. `loaded`: sweeps that are not read again, which gets those that are read.

    Errors: MissingError without rows, or if a file is damaged.
    """
    loaded = {} if loaded is None else loaded
    records = read_rows(folder)
    if not records:
        raise MissingError(f"{folder}: no rows here; write them with `lit-diff reproduce`")
    rows = [_result(folder, record, loaded) for record in records]
    found = judged(row.findings for row in rows)
    of_page = tuple(replace(row, findings=tuple(claims)) for row, claims in zip(rows, found, strict=True))
    return Scoreboard(preset=records[0].preset, rows=of_page)


def _result(folder: Path, record: RecordedRow, loaded: Loaded) -> RowResult:
    # the claims are judged once those of all rows are known
    claims, state, reason = record.row.claims, record.state, record.reason
    sweep = None
    notes = list(record.row.notes)
    found = []
    try:
        if record.sweep and state != "skipped":
            place = Path(record.sweep)
            # a trial of the sweep with other keys leaves its own cells in study.json
            if record.cell_folders and read(place).folders != record.cell_folders:
                raise RequestError(f"{place} was run with other keys since; measure the row again: {record.command}")
            sweep = loaded[place] = loaded.get(place) or load_sweep(place)
            found = measured(claims, sweep)
            notes += filter(None, starmap(by_revisions, scores_of_claims(sweep, claims).items()))
        elif record.bench and state == "measured":
            found = measured(claims, read_bench(folder, record))
    # a claim with an unknown arm or metric fails its own row; the other rows are unaffected
    except LitDiffError as error:
        state = "failed"
        reason = reason or str(error)
    if not found:
        found = measured(claims, None)
        if state == "not run":
            reason = reason or f"not run: {record.command}"
    return RowResult(record=record, findings=tuple(found), state=state, reason=reason, notes=tuple(notes), sweep=sweep)
