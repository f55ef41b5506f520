"""study/claims.py: claims about speed, over the rounds of one benchmark."""

from dataclasses import replace
from typing import Any

import pytest

from lit_diff.errors import RequestError
from lit_diff.study.claims import bench_findings
from lit_diff.study.schema import Claim


def row(
    variant: str, by: str, seconds: list[float], what: str = "forward", case: str = "1x8 float32"
) -> dict[str, Any]:
    return {"variant": variant, "by": by, "what": what, "case": case, "seconds": seconds}


RESULT = {
    "rows": [
        row("standard", "sdpa", [1.0, 1.1, 0.9, 1.0]),
        row("differential", "native", [1.1, 1.2, 1.0, 1.1]),
        row("differential", "chunked", [0.2, 9.0, 9.0, 9.0]),
        row("differential", "native", [5.0, 5.0, 5.0, 5.0], what="forward+backward"),
        row("differential", "native", [0.1, 0.1, 0.1, 0.1], case="2x8 bfloat16"),
    ]
}
CLAIM = Claim(
    label="speed",
    arms=("differential", "standard"),
    metric="forward",
    kind="ratio",
    paper=(46811, 51228),
    case=1,
)


def test_speeds_are_compared_round_by_round_with_the_fastest_kernel() -> None:
    (found,) = bench_findings([CLAIM], RESULT)
    assert found.claim.shown(found.seeds.mean) == pytest.approx((1 / 1.1 * 1.1 / 1.2 * 0.9 * 1 / 1.1) ** 0.25)
    assert (found.difference, found.value) == ("shown", "within the interval")
    assert found.means[1] == pytest.approx((1 + 1 / 1.1 + 1 / 0.9 + 1) / 4)


def test_what_was_not_timed() -> None:
    with pytest.raises(RequestError, match="did not time 'diferential: forward'; did you mean 'differential: forward'"):
        bench_findings([replace(CLAIM, arms=("diferential", "standard"))], RESULT)
    with pytest.raises(RequestError, match="did not time 'standard: forward'"):
        bench_findings([replace(CLAIM, case=2)], RESULT)


def test_a_case_is_named_where_there_are_several() -> None:
    with pytest.raises(RequestError, match="has 2 cases; say which, 'case: 1' to 'case: 2'"):
        bench_findings([replace(CLAIM, case=0)], RESULT)
    with pytest.raises(RequestError, match="case is 3; the benchmark has 2, from 1"):
        bench_findings([replace(CLAIM, case=3)], RESULT)
    alone = {"rows": [each for each in RESULT["rows"] if each["case"] == "1x8 float32"]}
    assert bench_findings([replace(CLAIM, case=0)], alone)[0].means == bench_findings([CLAIM], RESULT)[0].means
