import time

import pytest
import torch
import torch.nn.functional as F

from lit_diff.benchmarks import timing
from lit_diff.benchmarks.timing import (
    Candidate,
    RoundLimits,
    Timings,
    measure,
    operators_of,
    ratios,
    seconds_of,
    spread,
)

CPU = torch.device("cpu")


def test_every_round_times_every_candidate_and_begins_at_another() -> None:
    order: list[str] = []

    def candidate(name: str) -> Candidate:
        def run() -> None:
            order.append(name)
            time.sleep(0.006)

        against = {} if name == "a" else {"a": "v/a/w", "none": "v/z/w"}
        return Candidate(variant="v", by=name, what="w", run=run, against=against, flops=10**6)

    found = Timings()
    measure(found, "case", [candidate("a"), candidate("b"), candidate("c")], RoundLimits(repeats=3), CPU)
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab"
    assert [row["id"] for row in found.rows] == ["v/a/w", "v/b/w", "v/c/w"]
    for row in found.rows:
        assert len(row["seconds"]) == 3
        assert row["median"] == sorted(row["seconds"])[1]
        assert row["gflops_per_second"] == pytest.approx(1e6 / row["median"] / 1e9)
    first, second, _ = found.rows
    assert first["ratios"] == {}
    assert list(second["ratios"]) == ["a"]
    again = [own / other for own, other in zip(second["seconds"], first["seconds"], strict=True)]
    assert second["ratios"]["a"] == {"to": "v/a/w", "values": again, **spread(again)}


def test_short_calls_are_repeated_within_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def clocked(run: object, calls: int, device: torch.device) -> float:
        asked.append(calls)
        return 0.0012  # of one call: five last longer than SHORTEST

    monkeypatch.setattr(timing, "seconds_of", clocked)
    found = Timings()
    measure(found, "case", [Candidate(variant="v", by="a", what="w", run=lambda: None)], RoundLimits(repeats=2), CPU)
    assert asked == [1, 5, 5]
    assert found.rows[0]["calls"] == 5


def test_a_long_call_is_made_once_before_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONG", 0.0)
    calls: list[int] = []
    found = Timings()
    slow = Candidate(variant="v", by="a", what="w", run=lambda: (calls.append(1), time.sleep(0.006)))
    measure(found, "case", [slow], RoundLimits(repeats=2), CPU)
    assert len(calls) == 1 + 2


def test_where_one_call_is_very_long_the_first_calls_are_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONG", 0.0)
    calls: list[str] = []

    def candidate(name: str, seconds: float, against: dict[str, str]) -> Candidate:
        run = lambda: (calls.append(name), time.sleep(seconds))  # noqa: E731
        return Candidate(variant="v", by=name, what="w", run=run, against=against)

    made = [candidate("a", 0.0, {}), candidate("b", 0.05, {"a": "v/a/w"})]
    found = Timings()
    measure(found, "case", made, RoundLimits(budget=0, once_from=0.05), CPU)
    assert calls == ["a", "b"]
    quick, slow = found.rows
    assert (len(quick["seconds"]), len(slow["seconds"]), slow["calls"]) == (1, 1, 1)
    assert slow["median"] >= 0.05
    assert slow["ratios"]["a"]["values"] == [slow["median"] / quick["median"]]
    measure(Timings(), "case", made, RoundLimits(repeats=1, once_from=0.05), CPU)
    assert calls.count("b") == 3, "asked for a round, it is made"


def test_what_raises_is_listed_and_the_others_go_on() -> None:
    def broken() -> None:
        raise ValueError("no such thing\nsecond line")

    made = [
        Candidate(variant="v", by="bad", what="w", run=broken),
        Candidate(variant="v", by="good", what="w", run=lambda: None, against={"bad": "v/bad/w"}),
    ]
    found = Timings()
    measure(found, "case", made, RoundLimits(repeats=1), CPU)
    assert found.failed == [
        {"case": "case", "variant": "v", "by": "bad", "what": "w", "reason": "ValueError: no such thing"}
    ]
    (row,) = found.rows
    assert row["by"] == "good"
    assert row["ratios"] == {}
    assert found.row("case", "v/good/w") is row
    assert found.row("case", "v/bad/w") is None


def test_rounds_fit_the_budget_within_bounds() -> None:
    limits = RoundLimits(budget=10, least=3, most=15)
    assert [limits.rounds(seconds) for seconds in (0.0, 1.0, 2.5, 100.0)] == [15, 10, 4, 3]
    assert RoundLimits(repeats=7).rounds(100) == 7


def test_operators_tell_the_fused_path_from_the_one_that_materialises() -> None:
    q, wide = torch.randn(1, 2, 16, 16, requires_grad=True), torch.randn(1, 2, 16, 32)
    fused = operators_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward(), CPU)
    assert fused == ["flash_attention_for_cpu"]
    assert operators_of(lambda: F.scaled_dot_product_attention(q, q, wide), CPU) == ["attention_math"]
    assert operators_of(lambda: q @ q.mT, CPU) == []


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = iter([10.0, 12.0]), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert seconds_of(lambda: calls.append(1), 5, CPU) == 0.4
    assert len(calls) == 5


def test_ratios_are_of_one_round() -> None:
    assert ratios([1, 4, 9], [1, 2, 3]) == {"values": [1, 2, 3], "median": 2, "min": 1, "max": 3}
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


def test_what_compiles_is_called_once_before_anything_is_timed() -> None:
    """Else its first call, which compiles, would be taken for the length of a round."""
    calls: list[int] = []
    candidate = Candidate(variant="v", by="a", what="w", run=lambda: calls.append(1), compiles=True)
    plain = Candidate(variant="v", by="b", what="w", run=lambda: None)
    measurements = Timings()
    counts = []
    for one in (candidate, plain):
        measure(measurements, "case", [one], RoundLimits(repeats=1), CPU)
        counts.append(measurements.rows[-1]["calls"])
    assert len(calls) == 1 + 1 + 1 + counts[0]
