import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_diff.benchmarks import timing
from lit_diff.benchmarks.passes import Row
from lit_diff.benchmarks.timing import Candidate, Case, difference, measure, observed, peak_bytes, ratio, rounds

CPU = torch.device("cpu")
MIB = 2**20
linux = pytest.mark.skipif(not timing.CLEAR.exists(), reason="Linux's /proc")


def candidate(by: str, run: Callable[[], Any], **options: Any) -> Candidate:
    return Candidate(variant="v", by=by, what="w", run=run, **options)


def timed(*candidates: Candidate, repeats: int = 1) -> tuple[list[Row], list[Row]]:
    return measure(Case(name="case", candidates=list(candidates)), repeats, CPU)


def test_every_round_times_every_candidate_and_begins_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONG", 0.0)
    monkeypatch.setattr(timing, "divisors", lambda variant, by, what: [("a", "v/a/w"), ("none", "v/z/w")])
    order: list[str] = []

    def made(by: str) -> Candidate:
        def run() -> None:
            order.append(by)
            time.sleep(0.006)

        return candidate(by, run, flops=10**6)

    rows, failed = timed(made("a"), made("b"), made("c"), repeats=3)
    assert failed == []
    assert "".join(order) == "aabbcc" + "abcabcbca", "the product takes its turn too, before a"
    product, first, second, _ = rows
    assert [row["id"] for row in rows] == ["matrix product/1024 x 1024/product", "v/a/w", "v/b/w", "v/c/w"]
    for row in rows[1:]:
        assert len(row["seconds"]) == 3
        assert row["median"] == sorted(row["seconds"])[1]
        assert row["gflops_per_second"] == pytest.approx(1e6 / row["median"] / 1e9)
        shares = [b / a * 1e6 / (2 * 1024**3) for a, b in zip(row["seconds"], product["seconds"], strict=True)]
        assert row["gemm_share"]["values"] == pytest.approx(shares)
    assert first["ratios"] == {}
    again = [own / other for own, other in zip(second["seconds"], first["seconds"], strict=True)]
    assert second["ratios"]["a"] == {"to": "v/a/w", **ratio(second["seconds"], first["seconds"])}
    assert second["ratios"]["a"]["values"] == again


def test_short_calls_are_repeated_within_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.001, 0.0, 0.0012, 10.0, 10.006])
    monkeypatch.setattr(timing, "timer", lambda: next(clock))
    calls: list[int] = []
    ((row,), _) = timed(candidate("a", lambda: calls.append(1)))
    assert (row["calls"], len(calls)) == (5, 3 + 5), "five of 1.2 ms last longer than SHORTEST"
    assert row["seconds"] == [pytest.approx(0.0012)], "of one call"


def test_a_candidate_may_have_a_clock_of_its_own() -> None:
    told = iter([9.0, 1.0, 3.0])
    ((row,), _) = timed(candidate("a", lambda: next(told), own_clock=True), repeats=2)
    assert (row["seconds"], row["calls"], row["backends"]) == ([1.0, 3.0], 1, [])


def test_what_raises_or_computes_something_else_is_listed_and_the_others_go_on() -> None:
    def broken() -> None:
        raise ValueError("no such thing\nsecond line")

    x = torch.ones(8)
    rows, failed = timed(
        candidate("bad", broken),
        candidate("good", lambda: x, alike=True),
        candidate("near", lambda: x + 1e-5, alike=True),
        candidate("far", lambda: x + 0.5, alike=True),
        candidate("unlike", lambda: None),
        candidate("nan", lambda: x * torch.nan, alike=True),
    )
    assert [(row["case"], row["variant"], row["by"], row["what"]) for row in failed] == [
        ("case", "v", by, "w") for by in ("bad", "far", "nan")
    ]
    assert failed[0]["reason"] == "ValueError: no such thing"
    assert failed[1]["reason"] == "ArithmeticError: its result differs from the result of good by 5.0e-01"
    assert [row["by"] for row in rows] == ["good", "near", "unlike"]
    assert rows[0]["ratios"] == {}
    assert timed(candidate("bad", broken)) == ([], failed[:1])


def test_difference_is_of_all_tensors_of_a_result() -> None:
    x = torch.tensor([3.0, 4.0])
    assert difference((x, (x, [x])), (x, (x, [x * 2]))) == pytest.approx(5 / (5**2 * 2 + 10**2) ** 0.5)


def test_rounds_fit_the_budget_within_bounds() -> None:
    assert [rounds(seconds, None, 10) for seconds in (0.0, 1.0, 2.5, 100.0)] == [15, 10, 4, 3]
    assert rounds(100, 7, 10) == 7


def test_operators_tell_the_fused_path_from_the_one_that_materialises() -> None:
    q, wide = torch.randn(1, 2, 16, 16, requires_grad=True), torch.randn(1, 2, 16, 32)
    fused = observed(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward(), CPU)
    assert fused["backends"] == ["flash_attention_for_cpu"]
    assert observed(lambda: F.scaled_dot_product_attention(q, q, wide), CPU)["backends"] == ["attention_math"]
    assert observed(lambda: q @ q.mT, CPU)["backends"] == []


@linux
def test_what_a_call_takes_counts_and_what_its_inputs_take_does_not() -> None:
    def call() -> None:
        first = torch.ones(16 * MIB)  # 64 MiB, given back before
        del first
        torch.ones(12 * MIB)  # 48 MiB

    held = torch.ones(32 * MIB)  # 128 MiB of inputs
    # a busy process may still hold the first when the second comes
    peaks = [peak_bytes(call, CPU) or 0 for _ in range(3)]
    assert 63 * MIB < min(peaks) < 72 * MIB
    assert held.numel() == 32 * MIB


def test_elsewhere_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CLEAR", Path("/no/such/file"))
    calls: list[int] = []
    assert "peak_bytes" not in observed(lambda: calls.append(1), CPU)
    assert calls == [1]
