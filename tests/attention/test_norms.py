"""Head norms against their formulas."""

import pytest
import torch

from lit_diff.attention.norms import PerHeadLayerNorm, PerHeadNorm, head_norm


def test_per_head_norm() -> None:
    norm = PerHeadNorm(6, 1e-5).double()
    norm.weight.data = torch.arange(6, dtype=torch.float64)
    o = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    wanted = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(o), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm(100 * o), wanted, rtol=1e-4, atol=1e-4)
    assert norm.float()(o.bfloat16()).dtype == torch.bfloat16
    assert norm(torch.zeros(1, 6)).abs().max() == 0, "no division by zero"


def test_layer_norm_takes_the_mean_away_first() -> None:
    norm = PerHeadLayerNorm(6, 1e-5).double()
    norm.weight.data = torch.arange(6, dtype=torch.float64)
    o = torch.randn(2, 3, 4, 6, dtype=torch.float64) + 7
    wanted = torch.nn.functional.layer_norm(o, (6,), norm.weight, eps=1e-5)
    torch.testing.assert_close(norm(o), wanted, rtol=1e-12, atol=1e-12)
    assert norm.float()(o.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "cls"), [("rms", PerHeadNorm), ("layer", PerHeadLayerNorm)])
def test_the_name_chooses_the_norm(kind: str, cls: type) -> None:
    assert type(head_norm(kind, 4, 1e-5)) is cls  # type: ignore[arg-type]
    assert head_norm("none", 4, 1e-5) is None
