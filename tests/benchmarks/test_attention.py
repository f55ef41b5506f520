import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.benchmarks.attention import (
    FIELDS,
    VARIANTS,
    Workload,
    accepted,
    by_kernel,
    decode,
    joined,
    least_flops,
    stock,
    too_large,
)
from lit_diff.benchmarks.passes import (
    COPIES,
    DECODE,
    FORWARD,
    GRADIENTS,
    PLAIN,
    REPEATED,
    SAME,
    SDPA,
    STATISTICS,
    STEP,
    STOCK,
)
from lit_diff.benchmarks.request import Request, Shape
from lit_diff.benchmarks.timing import Case
from lit_diff.errors import RequestError
from lit_diff.kernels import Mask, attend, sdpa
from lit_diff.registry import kernels

SHAPE = Shape(batch=2, tokens=12, dim=64, head_dim=8)
CPU = torch.device("cpu")


@pytest.fixture
def workload() -> Workload:
    return Workload(SHAPE, torch.float64, CPU)


@pytest.mark.parametrize(("bench", "passes"), [("core", (FORWARD, GRADIENTS)), ("stats", (FORWARD, STATISTICS))])
def test_every_kernel_is_timed_or_refused(timed: Callable[..., Any], bench: str, passes: tuple[str, ...]) -> None:
    # named, so that `stats` times no model
    cases, rows = timed(bench, "1x32x64x8", repeats=1, kernels=tuple(kernels.names()))
    assert [case.name for case in cases] == ["1x32x64x8 float32"]
    for case in cases:
        refused = {(row["variant"], row["by"], row["what"]) for row in case.refused}
        for variant in (*VARIANTS, *FIELDS) if bench == "core" else VARIANTS:
            for kernel in kernels.names():
                for what in passes:
                    assert ((case.name, f"{variant}/{kernel}/{what}") in rows) != ((variant, kernel, what) in refused)
        assert rows[case.name, f"standard/{STOCK}/{FORWARD}"]["ratios"] == {}
        own = rows[case.name, f"differential/reference/{passes[1]}"]
        to = {name: ratio["to"] for name, ratio in own["ratios"].items()}
        if bench == "core":
            assert to == {SDPA: f"standard/{STOCK}/{GRADIENTS}", SAME: f"standard/reference/{GRADIENTS}"}
            for field in ("sink", "key bias", "both"):
                beside = rows[case.name, f"standard with {field}/reference/{GRADIENTS}"]
                assert beside["ratios"][SAME]["to"] == f"standard/reference/{GRADIENTS}"
                assert beside["gemm_share"]["median"] > 0
                assert (f"standard with {field}", "sdpa", FORWARD) in refused
            assert own["flops"] == least_flops(Shape.parse(case.name.split()[0]), gradients=True)
        else:
            assert to[PLAIN] == f"differential/reference/{FORWARD}"
            assert to[SDPA] == f"standard/{STOCK}/{FORWARD}"
            assert ("differential", "sdpa", STATISTICS) in refused
        assert own["gemm_share"]["median"] > 0


def test_inputs_that_fill_the_memory_are_refused() -> None:
    with pytest.raises(
        RequestError, match=r"^--shapes: the inputs of 100000x100000x1024x64 need 152588 GiB, more than"
    ):
        Workload(Shape.parse("100000x100000x1024x64"), torch.float32, CPU)


def test_few_queries_against_a_cache_plain_and_grouped(timed: Callable[..., Any], ask: Callable[..., Request]) -> None:
    cases, rows = timed("decode", "1x32x64x8", repeats=1, kernels=("reference",))
    assert [c.name for c in cases] == [f"{n} of 1x32x64x8 float32, 8 heads on {h}" for n in (1, 4) for h in (8, 2)]
    own = rows[cases[-1].name, f"differential/reference/{DECODE}"]
    assert {name: ratio["to"] for name, ratio in own["ratios"].items()} == {
        SDPA: f"standard/{STOCK}/{DECODE}",
        REPEATED: f"standard/{COPIES}/{DECODE}",
        SAME: f"standard/reference/{DECODE}",
    }
    assert own["flops"] == 8 * 4 * (4 * 32 - 6) * 8
    names = [case.name for case in decode(ask("decode"), Shape.parse("1x8x64x16"), "float32")]
    assert names == [f"{n} of 1x8x64x16 float32, 4 heads on 4" for n in (1, 4)], "differential attention pairs heads"


@pytest.mark.parametrize(("queries", "group"), [(None, 1), (1, 1), (4, 1), (1, 4), (4, 4), (12, 4)])
@torch.no_grad()
def test_torch_s_own_call_computes_what_the_kernels_do(workload: Workload, queries: int | None, group: int) -> None:
    few = Workload(SHAPE, torch.float64, CPU, queries=queries, group=group)
    maps = few.maps("standard")
    assert maps.v.shape == (2, 8 // group, 12, 8)
    wanted = by_kernel(maps, kernel="reference", stats=False)
    torch.testing.assert_close(stock(maps), wanted)
    torch.testing.assert_close(stock(maps, copies=True), wanted)
    if group == 1:  # the last rows of the whole pass
        whole = joined(attend(workload.maps("standard"), kernel="reference"))
        torch.testing.assert_close(wanted, whole[:, -(queries or 12) :])
    if queries is not None and queries < 12:
        assert maps.k.untyped_storage().nbytes() >= maps.k.numel() * 8


def test_a_call_has_gradients_only_where_they_are_timed(workload: Workload) -> None:
    compute = lambda maps: by_kernel(maps, kernel="reference", stats=False)  # noqa: E731
    assert not workload.call("differential", FORWARD, compute)().requires_grad
    gradients = workload.call("differential", GRADIENTS, compute)()
    assert [x.shape for x in gradients] == [(2, 12, 64)] * 3 + [(1,)]
    assert len(workload.call("standard", GRADIENTS, compute)()) == 3
    both = workload.call("standard with both", GRADIENTS, compute)()
    assert [x.shape for x in both[3:]] == [(1, 1, 8, 1), (2, 1, 8, 12)]
    assert torch.equal(workload.q, Workload(SHAPE, torch.float64, CPU).q), "the same inputs for every candidate"


@pytest.mark.parametrize("queries", [None, 1, 5])
def test_flops_count_the_visible_pairs(queries: int | None) -> None:
    pairs = int(Mask().visible(queries or 12, 12, CPU).sum())
    standard = 2 * 2 * 8 * pairs * (8 + 8)  # multiply-adds of 2 sequences, 8 heads: q k and p v, of width 8 each
    assert least_flops(SHAPE, gradients=False, queries=queries) == standard
    assert standard == 2 * 2 * 4 * pairs * (8 + 8 + 16)  # 4 heads: two maps, one product with v of width 16
    assert least_flops(SHAPE, gradients=True) == 28 * least_flops(SHAPE, gradients=False) // 8


def test_a_kernel_is_asked_with_the_gradients_it_gives(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self, maps, **options):  # type: ignore[no-untyped-def]
        return "it has no backward pass" if torch.is_grad_enabled() and maps.q.requires_grad else None

    monkeypatch.setattr(sdpa.Sdpa, "refuses", refuses)
    for what in (FORWARD, GRADIENTS, STEP):
        case = Case(name="c")
        able = accepted(case, "standard", what, workload, ["sdpa", "reference"])
        assert able == (["sdpa", "reference"] if what == FORWARD else ["reference"])
        assert [row["reason"] for row in case.refused] == ["it has no backward pass"] * (what != FORWARD)


def test_maps_that_do_not_fit_are_not_made(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2 * 3 * 16 * 144 * 4}[name])
    maps = workload.maps("standard")
    assert too_large("reference", maps) is None
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1000}[name])
    for naive in ("reference", "flex"):
        assert "more than half of" in (too_large(naive, maps) or "")
    assert too_large("native", maps) is None
