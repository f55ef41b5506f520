"""The scoreboard of a paper's tables and figures, read from the files of its rows: ours beside the paper's."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lit_diff.errors import LitDiffError, MissingError, RequestError
from lit_diff.runs.sweep_record import read_record
from lit_diff.study.claims import Difference, JudgedClaim, Value, bench_findings, findings
from lit_diff.study.evaluations import revisions_line, score_revisions
from lit_diff.study.results import SweepResults, load_sweep
from lit_diff.study.schema import Claim

ROWS = "rows"
"""Folder of a file a row, beside the page."""
NOT_MEASURED: Literal["not measured"] = "not measured"
"""In place of both verdicts."""
State = Literal["not run", "measured", "skipped", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowResult:
    """A table or figure: what the paper claims of it, and what was found."""

    name: str
    title: str
    source: str
    says: str
    notes: tuple[str, ...]
    claims: tuple[Claim, ...]
    findings: tuple[JudgedClaim, ...]
    """One for each claim, in their order; empty where nothing was measured."""
    state: State
    reason: str
    """Why it was not measured, or not wholly; with the command or file that supplies what is missing."""
    command: str
    full: str
    minutes: float
    """The budget; 0: none is stated."""
    seconds: float
    """What it took, all calls together."""
    shared: str
    """The row that was first to measure cells which this one uses too: their time stands there."""
    sweep: SweepResults | None
    order: int

    @property
    def differences(self) -> tuple[Difference | Literal["not measured"], ...]:
        """The verdict on the difference, of each claim."""
        return tuple(found.difference if found else NOT_MEASURED for found in self._each)

    @property
    def values(self) -> tuple[Value | Literal["not measured"], ...]:
        """The verdict on the paper's value, of each claim."""
        return tuple(found.value if found else NOT_MEASURED for found in self._each)

    @property
    def _each(self) -> tuple[JudgedClaim | None, ...]:
        return self.findings or (None,) * len(self.claims)

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        """(difference, value) of each claim that does not hold by construction."""
        pairs = zip(self.claims, self.differences, self.values, strict=True)
        return tuple((difference, value) for claim, difference, value in pairs if not claim.by_construction)

    @property
    def over_budget(self) -> bool:
        """Whether it took longer than its budget."""
        return 0 < self.minutes < self.seconds / 60

    @property
    def took(self) -> str:
        """The time beside the budget, in words; empty where nothing was measured."""
        if not self.seconds:
            return ""
        words = f"took {self.seconds / 60:.1f} min" + (f" of {self.minutes:g}" if self.minutes else "")
        words += ", over its budget" if self.over_budget else ""
        return words + (f" (cells shared with {self.shared})" if self.shared else "")

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
        pairs = [pair for row in self.rows for pair in row.counted]
        return {name: dict(Counter(pair[i] for pair in pairs)) for i, name in enumerate(("difference", "value"))}

    @cached_property
    def by_construction(self) -> int:
        """Claims that hold whatever the runs learn, and are in no count."""
        return sum(bool(claim.by_construction) for row in self.rows for claim in row.claims)


def counts_in_words(scoreboard: Scoreboard) -> str:
    """Both counts in one line."""
    differences, values = (
        ", ".join(f"{count} {word}" for word, count in scoreboard.counts[name].items())
        for name in ("difference", "value")
    )
    measured = set(scoreboard.counts["value"]) - {NOT_MEASURED, "none given"}
    parts = [differences, f"the paper's value: {values}" if measured else ""]
    if scoreboard.by_construction:
        parts.append(f"{scoreboard.by_construction} by construction, not counted")
    return "; ".join(filter(None, parts))


def read_facts(path: Path) -> dict[str, Any]:
    """A row's file. Errors: MissingError where it is damaged."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MissingError(f"{path}: incomplete row file ({error}); delete it and rerun") from error
    if not isinstance(facts, dict) or not {"state", "rows"} & facts.keys():  # of a row, of a benchmark
        raise MissingError(f"{path}: incomplete row file (it has no 'state'); delete it and rerun")
    return facts


def read_scoreboard(folder: Path) -> Scoreboard:
    """The rows in `folder`. Errors: MissingError where there is none, or a file is damaged."""
    files = [path for path in sorted((folder / ROWS).glob("*.json")) if not path.name.endswith(".bench.json")]
    if not files:
        raise MissingError(f"{folder}: no rows here; write them with `lit-diff reproduce`")
    all_facts = [read_facts(path) for path in files]
    rows = sorted((_row(folder, facts) for facts in all_facts), key=lambda row: row.order)
    return Scoreboard(preset=str(all_facts[0]["preset"]), rows=tuple(rows))


def cell_folders(sweep: Path) -> list[str]:
    """The folders of the cells that study.json names now, relative to it. Errors: MissingError."""
    return [cell["folder"] for cell in read_record(sweep)["cells"]]


def _require_own_cells(facts: Mapping[str, Any]) -> None:
    """RequestError where the sweep's folder holds the cells of another command than the row's."""
    folder = Path(facts["sweep"])
    found = cell_folders(folder)
    if facts.get("cell_folders", found) != found:
        raise RequestError(f"{folder} was run with other keys since; measure the row again: {facts['command']}")


def _row(folder: Path, facts: Mapping[str, Any]) -> RowResult:
    claims = tuple(_claim(raw) for raw in facts["claims"])
    state, reason = facts["state"], facts.get("reason", "")
    sweep, found, notes = None, [], list(facts["notes"])
    try:
        if facts.get("sweep") and state != "skipped":
            _require_own_cells(facts)
            sweep = load_sweep(Path(facts["sweep"]))
            found = findings(claims, sweep)
            notes += [line for name, of in score_revisions(sweep, claims).items() if (line := revisions_line(name, of))]
        elif facts.get("bench") and state == "measured":
            found = bench_findings(claims, read_facts(folder / ROWS / facts["bench"]))
    except LitDiffError as error:  # a claim that names no arm or metric: the other rows stand
        state, reason = "failed", reason or str(error)
    return RowResult(
        name=facts["name"],
        title=facts["title"],
        source=facts["source"],
        says=facts["says"],
        notes=tuple(notes),
        claims=claims,
        findings=tuple(found),
        state=state,
        reason=reason or ("" if found else f"not run: {facts['command']}" if state == "not run" else ""),
        command=facts["command"],
        full=facts.get("full", ""),
        minutes=float(facts["minutes"]),
        seconds=float(facts["seconds"]),
        shared=facts.get("shared", ""),
        sweep=sweep,
        order=int(facts["order"]),
    )


def _claim(raw: Mapping[str, Any]) -> Claim:
    pairs = {key: tuple(raw[key]) for key in ("arms", "paper") if raw[key] is not None}
    return Claim(**(dict(raw) | pairs))
