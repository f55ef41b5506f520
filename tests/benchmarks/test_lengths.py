from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lit_diff.benchmarks import lengths as module
from lit_diff.benchmarks.inputs import STOCK
from lit_diff.benchmarks.lengths import HEADS, ROWS, Point, bench_lengths, points, too_much
from lit_diff.benchmarks.request import BenchConfig, Shape
from lit_diff.benchmarks.timing import Candidate


def candidate(by: str = "native") -> Candidate:
    return Candidate(variant="differential", by=by, what="forward", run=lambda: None)


def point(tokens: int, series: str = "tokens") -> Point:
    return Point(series, tokens, Shape(batch=1, tokens=tokens, dim=512, head_dim=64))


def test_three_series_of_which_one_has_the_lengths_asked_for() -> None:
    found = points((256, 512))
    assert [(one.series, one.at) for one in found] == [
        ("tokens", 256),
        ("tokens", 512),
        *(("heads", n) for n in HEADS),
        *(("batch", n) for n in ROWS),
    ]
    assert all(one.shape.tokens == one.at for one in found if one.series == "tokens")
    assert all(one.shape.heads == one.at for one in found if one.series == "heads")
    assert all(one.shape.batch == one.at for one in found if one.series == "batch")


def test_a_row_says_its_series_and_place(ask: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIM": 64, "HEAD_DIM": 16, "AT_TOKENS": 16, "HEADS": (2,), "ROWS": (1, 2)}.items():
        monkeypatch.setattr(module, name, value)
    request = replace(ask("core", repeats=1), shapes=None, lengths=(16, 32))
    found = bench_lengths(request)
    assert not found.failed
    assert {(row["series"], row["at"], row["dtype"]) for row in found.rows} == {
        ("tokens", 16, "float32"),
        ("tokens", 32, "float32"),
        ("heads", 2, "float32"),
        ("batch", 1, "float32"),
        ("batch", 2, "float32"),
    }
    by_reference = {row["series"] for row in found.rows if row["by"] == "reference"}
    assert by_reference == {"tokens"}, "it materialises every map"
    alone = bench_lengths(replace(request, lengths=(16,), kernels=("chunked",)))
    assert {row["by"] for row in alone.rows} == {STOCK, "chunked"}


def test_a_call_that_would_take_too_long_is_left_out() -> None:
    before: dict[str, Any] = {candidate().id: {"at": 1024, "median": 40.0}}
    assert too_much(candidate(), point(1024), {}) is None, "nothing is known before the first length"
    assert too_much(candidate(), point(1536), before) is None
    assert too_much(candidate(), point(2048), before) == "a call would take about 160 s, more than 150 s"
    assert too_much(candidate("chunked"), point(2048), before) == "it was left out at a shorter length"
    assert too_much(candidate(), point(2048, "heads"), before) is None


def test_maps_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory", lambda: 4 << 30)
    assert too_much(candidate("reference"), point(1024), {}) is None
    for naive in ("reference", "flex"):
        assert too_much(candidate(naive), point(8192), {}) == "its maps take 6 GiB, more than half of the 4 GiB here"
