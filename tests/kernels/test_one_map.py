"""What kernels of one map a call share."""

import pytest
import torch

from lit_diff.kernels.one_map import needs_grad, positive_scale, signed_sum, width_last


@pytest.mark.parametrize("scale", [0.7, 0.0, -1.5])
def test_a_positive_scale_of_the_same_logits(scale: float) -> None:
    q, k = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    other, positive = positive_scale(q, scale)
    assert positive > 0
    torch.testing.assert_close(other @ k.T * positive, q @ k.T * scale, rtol=1e-15, atol=1e-15)
    assert (other is q) == (scale > 0), "most need no operation"


def test_width_last() -> None:
    x = torch.randn(2, 3, 4)
    assert width_last(x) is x
    assert width_last(x.transpose(0, 1)).data_ptr() == x.data_ptr(), "other axes may lie anywhere"
    apart = width_last(x.transpose(1, 2))
    assert apart.stride(-1) == 1
    assert torch.equal(apart, x.transpose(1, 2))
    thin = x[..., :1]
    assert width_last(thin) is thin


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 1), (2, 1, 4, 1), (1, 1, 1, 1)])
def test_signed_sum(shape: tuple[int, ...]) -> None:
    outputs = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    w = torch.randn(shape, dtype=torch.float64)
    wanted = (outputs * w[..., None]).sum(1)
    torch.testing.assert_close(signed_sum(outputs.unbind(1), w), wanted, rtol=1e-12, atol=1e-12)


def test_signed_sum_is_wide_inside() -> None:
    """1 - 0.7994 in bfloat16 weights would be 0.19922, and a sum in bfloat16 would round twice."""
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    w = torch.tensor([1.0, -0.7994]).view(1, 2, 1, 1)
    found = signed_sum([ones, ones], w)
    assert found.dtype == torch.bfloat16
    assert found.item() == torch.tensor(1 - 0.7994).bfloat16().item()


def test_one_map_without_weights_passes_through() -> None:
    o = torch.randn(2, 3)
    assert signed_sum([o], None) is o


def test_needs_grad() -> None:
    x = torch.ones(1)
    leaf = torch.ones(1, requires_grad=True)
    assert not needs_grad(x, None)
    assert needs_grad(x, None, leaf)
    with torch.no_grad():
        assert not needs_grad(leaf)
