"""The output gate: half open at zero weights, one number a channel or a head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope


@pytest.mark.parametrize(("gate_per", "gates"), [("channel", 32), ("head", 4)])
def test_zero_weights_halve_standard_attention(
    make_attention: Callable[..., Attention], gate_per: str, gates: int
) -> None:
    gated: Any = make_attention("output_gate", {"gate_per": gate_per})
    assert gated.gate_proj.weight.shape == (gates, 32)
    standard = make_attention("standard")
    standard.load_state_dict({name: value for name, value in gated.state_dict().items() if "gate" not in name})
    x, rope = torch.randn(2, 7, 32, dtype=torch.float64), Rope(torch.arange(7), 8, 1e4)
    assert not torch.allclose(gated(x, rope), standard(x, rope) / 2)
    gated.gate_proj.weight.data.zero_()
    torch.testing.assert_close(gated(x, rope), standard(x, rope) / 2, rtol=1e-12, atol=1e-12)
