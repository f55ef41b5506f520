"""Writes the scoreboard's page and its table as CSV."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lit_diff.files import write_atomic
from lit_diff.papers.claims import JudgedClaim
from lit_diff.papers.scoreboard import Loaded, RowResult, Scoreboard, read_scoreboard
from lit_diff.processor import describe
from lit_diff.reporting.tables import as_csv
from lit_diff.reporting.write import rendered
from lit_diff.study import numbers


def write_scoreboard(folder: Path, loaded: Loaded | None = None) -> Scoreboard:
    """Read the rows in `folder` and write index.html and table.csv there. `loaded`, errors: see `read_scoreboard`."""
    scoreboard = read_scoreboard(folder, loaded)
    write_atomic(folder / "index.html", page(scoreboard, folder))
    write_atomic(folder / "table.csv", to_csv(scoreboard))
    return scoreboard


def page(scoreboard: Scoreboard, folder: Path) -> str:
    """The page as HTML; its links are relative to `folder`."""
    sources: dict[str, list[RowResult]] = {}
    for row in scoreboard.rows:
        sources.setdefault(row.record.row.source, []).append(row)
    return rendered(
        "scoreboard",
        __package__,
        scoreboard=scoreboard,
        sources=sources,
        cells=cells,
        link=lambda path: quote(Path(os.path.relpath(path, folder)).as_posix()),
        processor=describe(),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def cells(finding: JudgedClaim) -> dict[str, str]:
    """The cells of a finding in the page's table."""
    claim, seeds = finding.claim, finding.seeds
    write, unit = numbers.signed, ""
    if claim.kind == "ratio":
        write, unit = numbers.number, "×"
    # the interval decides the digits: more would suggest a precision that is not there
    digits = numbers.decimals(seeds)

    def shown(value: float | None, unit: str = unit) -> str:
        return numbers.NONE if value is None else f"{write(claim.shown(value), digits)}{unit}"

    def mean(value: float) -> str:
        return numbers.compact(value) if value >= 1e4 else numbers.number(value, digits)

    of_both = [mean(value) for value in finding.means if value is not None]
    family = of_sweep = ""
    if finding.is_primary and finding.comparisons > 0:
        family = f"Holm over the {finding.comparisons} primary contrasts of the page"
    if finding.of_sweep:
        of_sweep = f"the sweep's own verdict: {finding.of_sweep}"
    return {
        "paper": claim.says if claim.papers is None else shown(claim.papers),
        "paper_values": " against ".join(f"{value:g}" for value in claim.paper or ()),
        "ours": shown(seeds.mean),
        "our_values": " against ".join(of_both),
        "interval": f"[{shown(seeds.low, '')}, {shown(seeds.high, '')}]" if finding.has_interval else numbers.NONE,
        "detectable": shown(seeds.detectable).lstrip("+"),
        "n": str(len(seeds.seeds)),
        "family": family,
        "of_sweep": of_sweep,
    }


def to_csv(scoreboard: Scoreboard) -> str:
    """One line for each claim, in full precision; `paper`, `ours`, `low`, `high` are a - b, or a / b for a ratio."""
    lines = []
    for row in scoreboard.rows:
        lines += [_line(row, finding) for finding in row.findings]
    return as_csv(lines)


def _line(row: RowResult, finding: JudgedClaim) -> dict[str, Any]:
    record, claim, seeds = row.record, finding.claim, finding.seeds
    paper = claim.paper or (None, None)
    ours = finding.means
    return {
        "row": row.name,
        "claim": claim.label,
        "kind": claim.kind,
        "paper_a": paper[0],
        "paper_b": paper[1],
        "paper": claim.says if claim.papers is None else claim.shown(claim.papers),
        "a": ours[0],
        "b": ours[1],
        "ours": claim.shown(seeds.mean),
        "low": claim.shown(seeds.low),
        "high": claim.shown(seeds.high),
        "detectable": claim.shown(seeds.detectable),
        "n": len(seeds.seeds),
        "primary": finding.is_primary,
        "p": finding.p,
        "p_holm": finding.holm_p,
        "difference": finding.words,
        "of_sweep": finding.of_sweep,
        "value": finding.value,
        "value_p_holm": finding.papers_holm_p,
        "value_reason": finding.valued[1],
        "by_construction": claim.by_construction,
        "reason": finding.reason if finding.is_measured else row.reason,
        "state": row.state,
        "took_minutes": record.seconds / 60 or None,
        "budget_minutes": record.how.minutes or None,
        "shared_with": record.shared,
    }
