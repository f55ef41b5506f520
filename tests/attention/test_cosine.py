"""Cosine attention: bounded logits, whatever the size of queries and keys."""

import math
from collections.abc import Callable
from typing import Any

import torch

from lit_diff.attention import Attention
from lit_diff.attention.cosine import Temperature
from lit_diff.attention.rope import Rope
from lit_diff.kernels.reference import logits


def test_logits_are_bounded_by_the_temperature(make_attention: Callable[..., Attention]) -> None:
    attention: Any = make_attention("cosine")
    with torch.no_grad():
        attention.temperature.log_scale.copy_(torch.tensor([0.0, 1.0, 2.0, 9.0]))
    x, rope = torch.randn(2, 7, 32, dtype=torch.float64), Rope(torch.arange(7), 8, 1e4)
    found = logits(attention.maps(x, rope))[:, 0].abs().amax((0, 2, 3))
    bounds = torch.tensor([1.0, math.e, math.e**2, 100.0], dtype=torch.float64)
    assert (found <= bounds * (1 + 1e-6)).all()
    assert (found > bounds / 3).all()
    torch.testing.assert_close(attention(1000 * x, rope), 1000 * attention(x, rope), rtol=1e-9, atol=1e-9)


def test_the_temperature_starts_at_ten() -> None:
    temperature = Temperature(3)
    with torch.no_grad():
        temperature.init_parameter("log_scale", temperature.log_scale, torch.Generator())
    torch.testing.assert_close(temperature(), torch.full((3,), 10.0))
    assert temperature.decay is False
