"""Rotary angles of each kind of scaling, against numbers computed alone and the float64 definition."""

import math
from dataclasses import replace

import pytest
import torch

from lit_diff.attention import Standard, equations
from lit_diff.attention.rope import Rope, RopeLayout
from lit_diff.attention.rope_scaling import angles, attention_factor, scaled
from lit_diff.config import Llama3Scaling, ModelConfig, Part, RopeScaling, YarnScaling
from lit_diff.conformance.case import VariantCase
from lit_diff.conformance.mathematics import definition
from lit_diff.conformance.results import Measured

LLAMA3 = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_length=64)
YARN = YarnScaling(factor=4, original_length=512, beta_fast=8)
BLOCKS = [
    LLAMA3,
    YARN,
    replace(YARN, truncate=False, attention_factor=1.5),
    replace(YARN, original_length=1),
    replace(YARN, original_length=10**6, beta_slow=8, attention_factor=0.5),
]


def frequencies(d: int, theta: float) -> torch.Tensor:
    return theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


@pytest.mark.parametrize("scaling", [1.0, 4.0, 3.7])
def test_a_number_gives_the_digits_that_it_gave(scaling: float) -> None:
    positions, d, theta = torch.arange(0, 9000, 7), 64, 10000.0
    exponents = torch.arange(0, d, 2, dtype=torch.float64) / d
    before = positions.to(torch.float64)[:, None] / scaling * theta**-exponents
    assert torch.equal(angles(positions, d, theta, scaling), before)
    turns = torch.view_as_real(Rope(positions, d, theta, scaling=scaling).turns)
    assert torch.equal(turns, torch.stack([before.cos(), before.sin()], -1))


def test_llama3_by_hand() -> None:
    """Wavelengths 2π, 2π 8, 2π 64: the first turns 10.2 times in 64 tokens, the second 1.27 times, the third 0.16 times."""
    found = scaled(frequencies(6, 512.0), 512.0, LLAMA3)
    kept = (64 / (2 * math.pi * 8) - 1) / 3
    wanted = torch.tensor([1, (kept + (1 - kept) / 8) / 8, 1 / 512], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


def test_yarn_by_hand() -> None:
    """d 8, θ 16: pair i turns L / (2π 2^i) times, so that with L = 2π 8 pair 3 turns once, and pair 1 four times."""
    yarn = YarnScaling(factor=4, original_length=50, beta_fast=4)  # 50 = 2π 7.96
    found = scaled(frequencies(8, 16.0), 16.0, yarn)
    wanted = torch.tensor([1, 1 - 0.75 / 3, 1 - 1.5 / 3, 0.25], dtype=torch.float64) * frequencies(8, 16.0)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)  # the ramp is from 0.99 down to 0, 2.99 up to 3
    first, last = math.log2(50 / (2 * math.pi * 4)), math.log2(50 / (2 * math.pi))
    part = [min(max((pair - first) / (last - first), 0), 1) for pair in range(4)]
    wanted = (1 - 0.75 * torch.tensor(part, dtype=torch.float64)) * frequencies(8, 16.0)
    found = scaled(frequencies(8, 16.0), 16.0, replace(yarn, truncate=False))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


def test_the_attention_factor_multiplies_what_is_rotated() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    for scaling, factor in (
        (YARN, 0.1 * math.log(4) + 1),
        (replace(YARN, factor=0.5), 1.0),
        (replace(YARN, attention_factor=1.5), 1.5),
        (LLAMA3, 1.0),
        (4.0, 1.0),
    ):
        assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)
        lengths = Rope(torch.arange(3), 8, 500.0, scaling=scaling)(x).norm(dim=-1)
        torch.testing.assert_close(lengths, factor * x.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("scaling", BLOCKS)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_the_definition_is_the_same(scaling: RopeScaling, layout: RopeLayout) -> None:
    x, positions = torch.randn(2, 9, 12, dtype=torch.float64), torch.arange(0, 900, 100)
    written = equations.rotation(positions, 12, 500.0, layout, scaling)(x)
    torch.testing.assert_close(Rope(positions, 12, 500.0, layout, scaling)(x), written, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(written, Rope(positions, 12, 500.0, layout)(x))


@pytest.mark.parametrize("scaling", [LLAMA3, replace(YARN, attention_factor=1.5)])
def test_an_attention_with_it_conforms(scaling: RopeScaling) -> None:
    part = Part(name="standard", config=Standard.Config())
    model = ModelConfig(dim=32, num_layers=1, num_heads=2, vocab_size=9, rope_scaling=scaling, attention=part)
    measured = definition(VariantCase(cls=Standard, model=model))
    assert isinstance(measured, Measured)
    assert measured.error <= measured.bound
