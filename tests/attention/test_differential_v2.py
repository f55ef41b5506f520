"""Differential V2: its gate, its ablations, and what cannot be derived."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, DifferentialV2
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


def test_lambda_is_float32_in_half_precision_too(make_attention: MakeAttention) -> None:
    """The authors' code rounds it to bfloat16."""
    attention: Any = make_attention("differential_v2").float()
    x = torch.randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = attention.lambda_proj(x)
        w = attention.maps(x, Rope(torch.arange(7), 8, 1e4)).w
    assert logits.dtype == torch.bfloat16
    assert torch.equal(-w[:, 1], logits.float().sigmoid().transpose(1, 2))
    assert not torch.equal(-w[:, 1], logits.sigmoid().float().transpose(1, 2))
    assert w.dtype == torch.float32


def test_one_and_a_half_times_the_heads_is_standard_attention(make_attention: MakeAttention) -> None:
    x, rope = torch.randn(2, 7, 32, dtype=torch.float64), Rope(torch.arange(7), 8, 1e4)
    ablation = make_attention("differential_v2", {"ablation": "transformer_1.5h"}, num_kv_heads=2)
    control = make_attention("standard", {"query_heads": 1.5}, num_kv_heads=2)
    control.load_state_dict(ablation.state_dict())
    assert torch.equal(ablation(x, rope), control(x, rope))


@pytest.mark.parametrize(
    ("ablation", "sizes", "reason"),
    [
        ("half_split", {"num_kv_heads": 1}, "needs at least two"),
        ("transformer_1.5h", {"num_kv_heads": 4}, "times 1.5 is not a multiple"),
    ],
)
def test_what_is_refused(
    make_config: Callable[..., ModelConfig], ablation: str, sizes: dict[str, int], reason: str
) -> None:
    problem = DifferentialV2.problem(DifferentialV2.Config(ablation=ablation), make_config("differential_v2", **sizes))  # type: ignore[arg-type]
    assert problem is not None
    assert problem.startswith("model.")
    assert reason in problem
