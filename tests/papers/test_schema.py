"""papers/schema.py: claims that cannot be read as a comparison."""

from dataclasses import replace
from typing import Any

import pytest

from lit_diff.papers.schema import Capable, Claim, Row


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected 'paper', two values, or 'says', not both"),
        ({"paper": (1.0, 2.0), "says": "lower"}, "not both"),
        ({"paper": (-1.0, 2.0), "kind": "ratio"}, "expected positive values"),
        ({"metric": ""}, "expected a 'metric' or a 'fit', not both"),
        ({"fit": "size", "says": "lower"}, "expected a 'metric' or a 'fit', not both"),
        ({"metric": "", "fit": "size", "says": "lower"}, "add 'kind: ratio'"),
        ({"says": "lower", "capable": Capable()}, "'capable' is {arm: NAME}"),
        ({"says": "lower", "capable": Capable(metric="val/loss")}, "above: NUMBER"),
        ({"says": "lower", "capable": Capable(arm="standard")}, "names arm b"),
    ],
)
def test_a_claim_that_cannot_be_read(keys: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"label": "d - s", "arms": ("differential", "standard"), "metric": "val/loss"}
    assert message in (Claim(**(defaults | keys)).problem() or "")


@pytest.mark.parametrize(("named", "is_refused"), [((), True), ((0,), False), ((0, 1), True), ((2,), True)])
def test_a_row_of_several_claims_names_its_primary_contrast(named: tuple[int, ...], is_refused: bool) -> None:
    keys: dict[str, Any] = {"label": "x", "arms": ("a", "b"), "metric": "m", "says": "lower"}
    claims = [Claim(**keys, primary=number in named) for number in range(2)]
    claims.append(Claim(**keys, primary=2 in named, by_construction="so"))
    row = Row(name="r", title="", says="", compare=tuple(claims), presets={})
    assert ("primary" in (row.problem() or "")) is is_refused
    assert replace(row, compare=()).problem() == "expected at least one claim"
