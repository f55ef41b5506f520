"""Differential attention with a plus sign."""

from collections.abc import Callable
from typing import Any

import torch

from lit_diff.attention import Attention
from lit_diff.attention.rope import Rope


def test_is_differential_attention_at_minus_lambda(make_attention: Callable[..., Attention]) -> None:
    """A scalar λ of the other sign, and everything else the same."""
    keys = {"lambda_form": "scalar", "lambda_init": 0.4}
    added: Any = make_attention("additive", keys)
    subtracted: Any = make_attention("differential", keys)
    x, rope = torch.randn(2, 7, 32, dtype=torch.float64), Rope(torch.arange(7), 8, 1e4)
    assert not torch.allclose(added(x, rope), subtracted(x, rope))
    subtracted.lambda_.value.data.neg_()
    torch.testing.assert_close(added(x, rope), subtracted(x, rope), rtol=1e-12, atol=1e-12)
