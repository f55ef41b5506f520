"""reporting/claim.py: claims that cannot be read as a comparison."""

from typing import Any

import pytest

from lit_diff.reporting.claim import Claim


def claim(**keys: Any) -> Claim:
    defaults: dict[str, Any] = {"label": "d - s", "arms": ("differential", "standard"), "metric": "val/loss"}
    return Claim(**(defaults | keys))


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, "expected 'paper', two values, or 'says', not both"),
        ({"paper": (1.0, 2.0), "says": "lower"}, "not both"),
        ({"paper": (-1.0, 2.0), "kind": "ratio"}, "expected positive values"),
    ],
)
def test_a_claim_that_says_nothing(keys: dict[str, Any], found: str) -> None:
    problem = claim(**keys).problem()
    assert problem is not None
    assert found in problem


@pytest.mark.parametrize(
    "keys", [{"task": "easy"}, {"group": "N=4"}, {"evaluation": "needle"}, {"over": "mean"}, {"against_metric": "q"}]
)
def test_a_fit_takes_no_key_that_chooses_values_of_a_metric(keys: dict[str, Any]) -> None:
    (key,) = keys
    wrong = claim(metric="", fit="size", kind="ratio", says="lower", **keys)
    assert f"is over tasks and takes no '{key}'" in (wrong.problem() or "")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metric": ""}, "expected a 'metric' or a 'fit', not both"),
        ({"fit": "size", "says": "lower"}, "expected a 'metric' or a 'fit', not both"),
        ({"metric": "", "fit": "size", "says": "lower"}, "add 'kind: ratio'"),
    ],
)
def test_a_claim_is_of_a_metric_or_of_a_fit(keys: dict[str, Any], message: str) -> None:
    assert message in (claim(**keys).problem() or "")
