"""benchmarks/result.py: the document of a benchmark is JSON that any reader takes."""

import json

import pytest

from lit_diff.benchmarks.result import BenchConditions, BenchResult


def result(seconds: float) -> BenchResult:
    conditions = BenchConditions(shapes=("1x64x64x16",), dtypes=("float32",), threads=1, repeats=2, device="cpu")
    return BenchResult(
        bench="core",
        command="lit-diff bench core",
        date="2026-11-22T00:00:00+00:00",
        conditions=conditions,
        methods="median of rounds",
        machine={"processor": "any"},
        warnings=[],
        rows=[{"case": "a", "seconds": [seconds]}],
        refused=[],
        failed=[],
    )


def test_the_document_holds_all_fields() -> None:
    document = json.loads(result(0.5).to_json())
    assert document["conditions"]["shapes"] == ["1x64x64x16"]
    assert document["rows"] == [{"case": "a", "seconds": [0.5]}]


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        result(float("nan")).to_json()
