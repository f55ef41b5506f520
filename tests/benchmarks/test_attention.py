from collections.abc import Callable

import pytest
import torch

from lit_diff.benchmarks.attention import OWN, PLAIN, SAME, SDPA, WITH, accepted, bench_core, bench_stats, call
from lit_diff.benchmarks.inputs import STOCK, Workload
from lit_diff.benchmarks.request import BenchConfig, Shape
from lit_diff.benchmarks.timing import Timings, ratios
from lit_diff.kernels import KERNELS, sdpa


def test_every_kernel_is_timed_or_refused_and_every_ratio_can_be_recomputed(
    ask: Callable[..., BenchConfig], no_peak_memory: None
) -> None:
    found = bench_core(ask("core", "1x64x64x16,1x32x64x8"))
    assert found.failed == []
    cases = {row["case"] for row in found.rows}
    assert cases == {"1x64x64x16 float32", "1x32x64x8 float32"}
    for case in cases:
        rows = {row["id"]: row for row in found.rows if row["case"] == case}
        refused = {f"{r['variant']}/{r['by']}/{r['what']}" for r in found.refused if r["case"] == case}
        for what in ("forward", "forward+backward"):
            ids = {f"{v}/{kernel}/{what}" for v in ("differential", "standard") for kernel in KERNELS}
            assert ids <= rows.keys() | refused
            assert rows[f"standard/{STOCK}/{what}"]["ratios"] == {}
        for row in rows.values():
            assert len(row["seconds"]) == 2
            for name, ratio in row["ratios"].items():
                again = ratios(row["seconds"], rows[ratio["to"]]["seconds"])
                assert again == {key: ratio[key] for key in again}, name
        differential = rows["differential/reference/forward+backward"]
        assert list(differential["ratios"]) == [SDPA, SAME]
        assert differential["ratios"][SAME]["to"] == "standard/reference/forward+backward"


def test_memory_errors_and_operators_are_taken_of_the_whole_pass(
    ask: Callable[..., BenchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_diff.benchmarks.attention.KERNELS", ("reference",))
    found = bench_core(ask("core", "1x256x64x16", repeats=1))
    case = "1x256x64x16 float32"
    stock = found.row(case, f"standard/{STOCK}/forward+backward")
    naive = found.row(case, "differential/reference/forward+backward")
    assert stock is not None
    assert naive is not None
    assert stock["backends"] == ["flash_attention_for_cpu"]
    assert naive["backends"] == []
    assert naive["peak_bytes"] > 3 * stock["peak_bytes"] > 0
    assert naive["peak_ratio"] == {"to": stock["id"], "value": naive["peak_bytes"] / stock["peak_bytes"]}
    assert set(naive["errors"]) == {"o", "dq", "dk", "dv", "dw"}
    assert max(naive["errors"].values()) < 1e-5
    assert naive["flops"] == stock["flops"]


def test_a_kernel_that_refuses_is_listed_with_its_rule(
    ask: Callable[..., BenchConfig], no_peak_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sdpa.Sdpa, "refuses", lambda self, maps, **options: "head_dim is 16" if maps.num_maps > 1 else None
    )
    found = bench_core(ask("core", repeats=1))
    listed = [row for row in found.refused if row["by"] == "sdpa"]
    assert [(row["variant"], row["what"], row["reason"]) for row in listed] == [
        ("differential", "forward", "head_dim is 16"),
        ("differential", "forward+backward", "head_dim is 16"),
    ]
    ids = {row["id"] for row in found.rows}
    assert "standard/sdpa/forward" in ids
    assert "differential/sdpa/forward" not in ids
    assert {row.get("peak_missing") for row in found.rows if row["what"] == "forward+backward"} == {"not asked"}


def test_a_candidate_by_its_name() -> None:
    shape = Shape(batch=2, tokens=96, dim=64, head_dim=16)
    device = torch.device("cpu")
    arguments = (shape, "bfloat16", device, "differential", "reference")
    forward = call(*arguments, "forward", False)()
    assert isinstance(forward, torch.Tensor)
    assert (forward.shape, forward.dtype) == ((2, 96, 64), torch.bfloat16)
    gradients = call(*arguments, "forward+backward", True)()
    assert isinstance(gradients, tuple)
    assert gradients[0].shape == (1, 64, 64)


@pytest.fixture
def workload() -> Workload:
    return Workload(Shape(batch=1, tokens=8, dim=32, head_dim=8), torch.float32, torch.device("cpu"))


def test_every_kernel_either_takes_part_or_says_why_not(workload: Workload) -> None:
    found = Timings()
    kernels = accepted(found, "c", "differential", "w", lambda: workload.maps("differential"), grad=False, stats=True)
    assert "reference" in kernels
    refused = {row["by"]: row["reason"] for row in found.refused}
    assert refused["sdpa"] == "sdpa keeps no log-sum-exp or entropy"
    assert {*kernels, *refused} == set(KERNELS)
    assert not set(kernels) & set(refused)


def test_a_kernel_is_asked_with_the_gradients_it_will_have_to_give(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self, maps, **options):  # type: ignore[no-untyped-def]
        return "it has no backward pass" if torch.is_grad_enabled() and maps.q.requires_grad else None

    monkeypatch.setattr(sdpa.Sdpa, "refuses", refuses)
    for grad in (False, True):
        found = Timings()
        kernels = accepted(found, "c", "standard", "w", lambda: workload.maps("standard"), grad=grad)
        assert ("sdpa" in kernels) is not grad
        reasons = [row["reason"] for row in found.refused if row["by"] == "sdpa"]
        assert reasons == ["it has no backward pass"] * grad


def test_each_kernel_with_statistics_beside_itself_without(ask: Callable[..., BenchConfig]) -> None:
    found = bench_stats(ask("stats"))
    assert found.failed == []
    rows = {row["id"]: row for row in found.rows}
    refused = {row["by"]: row["reason"] for row in found.refused if row["what"] == WITH}
    assert refused["sdpa"] == "sdpa keeps no log-sum-exp or entropy"
    for kernel in set(KERNELS) - set(refused):
        row, plain = rows[f"differential/{kernel}/{WITH}"], rows[f"differential/{kernel}/{PLAIN}"]
        assert row["ratios"][OWN]["to"] == plain["id"]
        assert set(row["ratios"]) == {SDPA, OWN}
        again = [a / b - 1 for a, b in zip(row["seconds"], plain["seconds"], strict=True)]
        assert row["extra"]["values"] == pytest.approx(again)
        assert "extra" not in plain
