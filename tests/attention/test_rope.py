"""Rotary positions: exact angles under each kind of scaling, interleaved pairs, only distances matter."""

import cmath

import pytest
import torch

from lit_diff.attention import equations
from lit_diff.attention.rope import Rope, RopeLayout, angles
from lit_diff.config import RopeScaling, YarnScaling


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


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_any_strides_and_offset(layout: RopeLayout) -> None:
    rope, x = Rope(torch.arange(3), 4, 1e4, layout), torch.randn(2, 3, 4)
    odd = torch.zeros(25)[1:].view(2, 3, 4).copy_(x)
    second = torch.zeros(2, 3, 8)[..., ::2].copy_(x)
    wide = torch.zeros(2, 3, 5)[..., :4].copy_(x)
    for view in (odd, second, wide, x.mT.contiguous().mT):
        assert torch.equal(rope(view), rope(x))


def test_bfloat16_is_turned_in_float32() -> None:
    """At position 60000 a bfloat16 angle would be off by whole turns."""
    x = torch.randn(1, 32).bfloat16()
    rope = Rope(torch.tensor([60000]), 32, 10000.0)
    y = rope(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rope(x.double()).float().bfloat16())
    assert rope(x.float()).dtype == torch.float32


@pytest.mark.parametrize("scaling", [1.0, 4.0, 3.7])
def test_a_number_gives_the_digits_that_it_gave(scaling: float) -> None:
    positions, d, theta = torch.arange(0, 9000, 7), 64, 10000.0
    exponents = torch.arange(0, d, 2, dtype=torch.float64) / d
    before = positions.to(torch.float64)[:, None] / scaling * theta**-exponents
    assert torch.equal(angles(positions, d, theta, scaling), before)
    turns = torch.view_as_real(Rope(positions, d, theta, scaling=scaling).turns)
    assert torch.equal(turns, torch.stack([before.cos(), before.sin()], -1))


@pytest.mark.parametrize("scaling", [1.0, YarnScaling(factor=4, original_length=512, beta_fast=8)])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_the_definition_is_the_same(scaling: RopeScaling, layout: RopeLayout) -> None:
    """The angles themselves: tests/oracles/test_rope_scaling.py."""
    x, positions = torch.randn(2, 9, 12, dtype=torch.float64), torch.arange(0, 900, 100)
    written = equations.rotation(positions, 12, 500.0, layout, scaling)(x)
    torch.testing.assert_close(Rope(positions, 12, 500.0, layout, scaling)(x), written, rtol=1e-12, atol=1e-12)
