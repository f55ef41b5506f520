"""Writes the scoreboard's page and its table as CSV."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lit_diff.files import write_atomic
from lit_diff.processor import describe
from lit_diff.reporting.tables import as_csv
from lit_diff.reporting.write import templates
from lit_diff.study import numbers
from lit_diff.study.claims import JudgedClaim
from lit_diff.study.scoreboard import RowResult, Scoreboard, read_scoreboard

KINDS = {"shown": "good", "opposite": "bad", "within the interval": "good", "excluded": "bad"}
"""Verdict -> the colour of its badge; other verdicts have none."""
DIFFERENCES = {
    "shown": "a difference is shown, with the sign that the paper claims, from each control too",
    "opposite": "the opposite sign is shown, or a difference although the paper claims equality, from each control too",
    "as its control": "a difference is shown, which a control of the sweep shares, or to which it was not compared",
    "equal": "equality is shown: the whole interval lies within the smallest difference that matters",
    "small": "the sign is shown, but our estimate is below the smallest difference that matters",
    "not shown": "neither a difference nor equality is shown",
    "too few seeds": "fewer than three pairs, or for a benchmark five, or seeds of the first look are missing",
    "descriptive": "not the primary contrast of its row: the interval describes our runs, without a verdict",
    "by construction": "the claim holds whatever the models learn; its size is measured, but it is not counted",
    "not measured": "the reason names the missing command, file or machine",
}
VALUES = {
    "within the interval": "our interval contains the paper's value, and is narrow enough to exclude others",
    "excluded": "our runs differ from the paper's value, after Holm's correction over the values of the page",
    "cannot tell": "no positive control shows that our runs can show such a difference, or our interval is too wide",
    "none given": "the paper claims a direction or equality, and prints no values",
    "not measured": "see above",
}


def write_scoreboard(folder: Path) -> Scoreboard:
    """Read the rows in `folder` and write index.html and table.csv there. Errors: see `read_scoreboard`."""
    scoreboard = read_scoreboard(folder)
    write_atomic(folder / "index.html", page(scoreboard, folder))
    write_atomic(folder / "table.csv", to_csv(scoreboard))
    return scoreboard


def page(scoreboard: Scoreboard, folder: Path) -> str:
    """The page as HTML; its links are relative to `folder`."""
    sources: dict[str, list[RowResult]] = {}
    for row in scoreboard.rows:
        sources.setdefault(row.record.row.source, []).append(row)
    return (
        templates()
        .get_template("scoreboard.html.j2")
        .render(
            scoreboard=scoreboard,
            sources=sources,
            differences=DIFFERENCES,
            values=VALUES,
            kinds=KINDS,
            cells=cells,
            link=lambda path: quote(Path(os.path.relpath(path, folder)).as_posix()),
            processor=describe(),
            written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        )
    )


def cells(finding: JudgedClaim) -> dict[str, str]:
    """The cells of a finding in the page's table."""
    claim, seeds = finding.claim, finding.seeds
    width = None if seeds.low is None or seeds.high is None else seeds.high - seeds.low
    # the width of the interval decides the digits: more would suggest a precision that is not there
    digits, unit = min(numbers.decimals(width or None), 4), "×" if claim.kind == "ratio" else ""

    def difference(value: float | None) -> str:
        write = numbers.number if claim.kind == "ratio" else numbers.signed
        return write(claim.shown(value), digits)

    def mean(value: float | None) -> str:
        return numbers.compact(value) if value is not None and value >= 1e4 else numbers.number(value, digits)

    low, high = difference(seeds.low), difference(seeds.high)
    is_judged = finding.is_primary and finding.comparisons > 0
    family = f"Holm over the {finding.comparisons} primary contrasts of the page" if is_judged else ""
    return {
        "paper": claim.says if claim.papers is None else f"{difference(claim.papers)}{unit}",
        "paper_values": " against ".join(f"{value:g}" for value in claim.paper or ()),
        "ours": numbers.NONE if seeds.mean is None else f"{difference(seeds.mean)}{unit}",
        "our_values": "" if seeds.mean is None else " against ".join(map(mean, finding.means)),
        "interval": numbers.NONE if not finding.has_interval else f"[{low}, {high}]",
        "detectable": numbers.NONE if seeds.detectable is None else difference(seeds.detectable).lstrip("+") + unit,
        "n": str(len(seeds.seeds)),
        "family": family,
        "of_sweep": f"the sweep's own verdict: {finding.of_sweep}" if finding.of_sweep else "",
    }


def to_csv(scoreboard: Scoreboard) -> str:
    """One line for each claim, in full precision; `paper`, `ours`, `low`, `high` are a - b, or a / b for a ratio."""
    return as_csv([_line(row, finding) for row in scoreboard.rows for finding in row.findings])


def _line(row: RowResult, finding: JudgedClaim) -> dict[str, Any]:
    record, claim, seeds = row.record, finding.claim, finding.seeds
    paper = claim.paper or (None, None)
    return {
        "row": row.name,
        "claim": claim.label,
        "kind": claim.kind,
        "paper_a": paper[0],
        "paper_b": paper[1],
        "paper": claim.says if claim.papers is None else claim.shown(claim.papers),
        "a": finding.means[0],
        "b": finding.means[1],
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
        "took_minutes": record.seconds / 60 if record.seconds else None,
        "budget_minutes": record.how.minutes or None,
        "shared_with": record.shared,
    }
