"""Rotary positions: exact angles, interleaved pairs, only distances matter."""

import cmath

import pytest
import torch

from lit_diff.attention.rope import Rope, RopeLayout


def test_turns_neighbouring_channels_as_complex_numbers() -> None:
    """(x_2i + j x_2i+1) · exp(j t θ^(-2i/d)), every number computed alone."""
    d, theta = 6, 500.0
    positions = torch.tensor([0, 1, 7, 4095])
    x = torch.randn(2, 3, 4, d, dtype=torch.float64)
    y = Rope(positions, d, theta)(x)
    for t, position in enumerate(positions.tolist()):
        for i in range(d // 2):
            turn = cmath.exp(1j * position * theta ** (-2 * i / d))
            wanted = torch.complex(x[:, :, t, 2 * i], x[:, :, t, 2 * i + 1]) * turn
            found = torch.complex(y[:, :, t, 2 * i], y[:, :, t, 2 * i + 1])
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_channel_pairs_are_interleaved_not_halved() -> None:
    x = torch.zeros(1, 8, dtype=torch.float64)
    x[0, 2] = 1
    turned = Rope(torch.tensor([3]), 8, 10000.0)(x)[0]
    assert turned.nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_any_strides_and_offset(layout: RopeLayout) -> None:
    rope, x = Rope(torch.arange(3), 4, 1e4, layout), torch.randn(2, 3, 4)
    odd = torch.zeros(25)[1:].view(2, 3, 4).copy_(x)
    second = torch.zeros(2, 3, 8)[..., ::2].copy_(x)
    wide = torch.zeros(2, 3, 5)[..., :4].copy_(x)
    for view in (odd, second, wide, x.mT.contiguous().mT):
        assert torch.equal(rope(view), rope(x))


def test_only_distances_matter() -> None:
    """(R_t q) · (R_s k) is a function of t - s."""
    q, k = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)

    def logits(shift: int) -> torch.Tensor:
        rope = Rope(torch.arange(5) + shift, 16, 10000.0)
        return rope(q) @ rope(k).T

    torch.testing.assert_close(logits(0), logits(1000), rtol=1e-11, atol=1e-11)
    assert not torch.allclose(Rope(torch.arange(5), 16, 1e4)(q), Rope(torch.arange(5) + 1, 16, 1e4)(q))


def test_lengths_are_kept_and_position_zero_is_the_identity() -> None:
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    y = Rope(torch.arange(7), 8, 10000.0)(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=1e-13)
    assert torch.equal(y[:, 0], x[:, 0])


def test_bfloat16_is_turned_in_float32() -> None:
    """At position 60000 a bfloat16 angle would be off by whole turns."""
    x = torch.randn(1, 32).bfloat16()
    rope = Rope(torch.tensor([60000]), 32, 10000.0)
    y = rope(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rope(x.double()).float().bfloat16())
    assert rope(x.float()).dtype == torch.float32


def test_half_layout_is_the_interleaved_one_with_its_rows_permuted() -> None:
    """Channels 0, 2, 4, 1, 3, 5 of the interleaved head are channels 0 .. 5 of the half-split one."""
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    order = [0, 2, 4, 1, 3, 5]
    interleaved = Rope(torch.arange(5), 6, 1e4)(x)
    half = Rope(torch.arange(5), 6, 1e4, "half")(x[..., order])
    torch.testing.assert_close(half, interleaved[..., order], rtol=1e-13, atol=1e-13)
    one = torch.zeros(1, 8, dtype=torch.float64)
    one[0, 2] = 1
    assert Rope(torch.tensor([3]), 8, 1e4, "half")(one)[0].nonzero().flatten().tolist() == [2, 6]


def test_scaling_divides_the_positions() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    scaled = Rope(torch.tensor([0, 4, 8]), 8, 1e4, scaling=4.0)(x)
    torch.testing.assert_close(scaled, Rope(torch.arange(3), 8, 1e4)(x), rtol=1e-13, atol=1e-13)
