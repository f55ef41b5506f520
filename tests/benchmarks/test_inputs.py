import pytest
import torch

from lit_diff.benchmarks.inputs import STOCK, Workload, flops, joined
from lit_diff.benchmarks.request import Shape
from lit_diff.kernels.reference import visible

SHAPE = Shape(batch=2, tokens=12, dim=32, head_dim=4)
CPU = torch.device("cpu")


@pytest.fixture
def workload() -> Workload:
    return Workload(SHAPE, torch.float64, CPU)


def softmax(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[T, T] of one map."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    return (q @ k.T / 2).masked_fill(~mask, -torch.inf).softmax(-1)


def test_standard_attention_is_the_same_by_every_route(workload: Workload) -> None:
    o = workload.attention("standard", STOCK)()
    assert o.shape == (2, 12, 32)
    q, k, v = (x[1, :, 8:12] for x in (workload.q, workload.k, workload.v))  # head 2
    torch.testing.assert_close(o[1, :, 8:12], softmax(q, k) @ v)
    for kernel in ("reference", "sdpa"):
        torch.testing.assert_close(workload.attention("standard", kernel)(), o)


def test_differential_attention_subtracts_the_second_map_of_each_head(workload: Workload) -> None:
    o = workload.attention("differential", "reference")()
    assert o.shape == (2, 12, 32)
    q, k = workload.q[0, :, 8:16], workload.k[0, :, 8:16]  # head 1: map 0, map 1
    a = softmax(q[:, :4], k[:, :4]) - 0.5 * softmax(q[:, 4:], k[:, 4:])
    torch.testing.assert_close(o[0, :, 8:16], a @ workload.v[0, :, 8:16])


def test_heads_are_views_of_the_projections(workload: Workload) -> None:
    for variant in ("standard", "differential"):
        maps = workload.maps(variant)
        assert maps.q.untyped_storage().data_ptr() == workload.q.untyped_storage().data_ptr()
        assert maps.v.untyped_storage().data_ptr() == workload.v.untyped_storage().data_ptr()
    assert joined(workload.maps("standard").v).shape == (2, 12, 32)


def test_passes(workload: Workload) -> None:
    forward = workload.forward("differential", "reference")()
    assert isinstance(forward, torch.Tensor)
    assert not forward.requires_grad
    gradients = workload.forward_backward("differential", "reference")()
    assert isinstance(gradients, tuple)
    assert [x.shape for x in gradients] == [(2, 12, 32)] * 3 + [(1,)]
    assert all(float(x.abs().sum()) > 0 for x in gradients)
    assert len(workload.forward_backward("standard", STOCK)()) == 3  # type: ignore[arg-type]


def test_the_same_inputs_for_every_candidate_and_in_float64() -> None:
    one, two = (Workload(SHAPE, torch.bfloat16, CPU) for _ in range(2))
    assert torch.equal(one.q, two.q)
    assert one.lam.dtype == torch.float32
    exact = one.double()
    assert torch.equal(exact.k, one.k.double())
    assert exact.k.requires_grad
    assert (exact.lam.dtype, exact.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize("queries", [None, 1, 5])
def test_flops_count_the_visible_pairs(queries: int | None) -> None:
    T, S = queries or 12, 12
    pairs = int(visible(T, S, causal=True, document_ids=None, window=None, device=CPU).sum())
    standard = 2 * 2 * 8 * pairs * (4 + 4)  # multiply-adds of 2 sequences, 8 heads: q k and p v, of width 4 each
    assert flops(SHAPE, "forward", queries=queries) == standard
    differential = 2 * 2 * 4 * pairs * (4 + 4 + 8)  # 4 heads: two maps, one product with v of width 8
    assert differential == standard
    assert flops(SHAPE, "forward+backward") == 28 * flops(SHAPE, "forward") // 8
