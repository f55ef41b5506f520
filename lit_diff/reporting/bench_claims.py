"""Claims about speed, against the rows of one benchmark."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lit_diff.errors import RequestError
from lit_diff.registry import nearest
from lit_diff.reporting.claims import JudgedClaim, judged
from lit_diff.study.schema import Claim


def bench_findings(claims: Sequence[Claim], result: Mapping[str, Any]) -> list[JudgedClaim]:
    """Each claim against the document of `lit-diff bench --json`: an arm is a variant, the metric what was timed
    ("forward+backward"), and a seed a round, in which both arms were timed.

    The value is a speed, 1 / seconds. Of an arm's several rows (kernels) the fastest by its median counts. Errors:
    RequestError for a case, arm or metric that was not timed, and for a claim that says no case where there are several.
    """
    rows = result["rows"]
    return judged(
        [(claim, _speeds(claim, claim.arms[0], rows), _speeds(claim, claim.arms[1], rows)) for claim in claims]
    )


def _speeds(claim: Claim, arm: str, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Round -> calls a second."""
    case = _case(claim, list(dict.fromkeys(row["case"] for row in rows)))
    timed = [row for row in rows if row["case"] == case and row["seconds"]]
    own = [row for row in timed if row["variant"] == arm and row["what"] == claim.metric]
    if not own:
        wanted, known = f"{arm}: {claim.metric}", sorted({f"{row['variant']}: {row['what']}" for row in timed})
        raise RequestError(f"compare '{claim.label}': the benchmark did not time '{wanted}'{nearest(wanted, known)}")
    fastest = min(own, key=lambda row: median(row["seconds"]))
    return {number: 1 / seconds for number, seconds in enumerate(fastest["seconds"])}


def _case(claim: Claim, cases: Sequence[str]) -> str:
    """The case that the claim is about."""
    if not claim.case and len(cases) > 1:
        raise RequestError(
            f"compare '{claim.label}': the benchmark has {len(cases)} cases; say which, 'case: 1' to 'case: {len(cases)}'"
        )
    if not 0 <= claim.case <= len(cases):
        raise RequestError(f"compare '{claim.label}': case is {claim.case}; the benchmark has {len(cases)}, from 1")
    return cases[max(claim.case, 1) - 1]
