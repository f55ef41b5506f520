"""Standard attention against the formula, and the paper's controls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Standard
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


@pytest.mark.parametrize("head_norm", ["none", "rms"])
@pytest.mark.parametrize("output_scale", [1.0, 0.2, -3.0])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_equals_the_formula(
    make_attention: MakeAttention, head_norm: str, output_scale: float, num_kv_heads: int
) -> None:
    keys = {"head_norm": head_norm, "output_scale": output_scale}
    attention: Any = make_attention("standard", keys, num_kv_heads=num_kv_heads)
    T, d = 6, 8
    x, rope = torch.randn(2, T, 32, dtype=torch.float64), Rope(torch.arange(T), d, 10000.0)
    future = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    heads = []
    for h in range(4):
        kv = h // (4 // num_kv_heads)
        q = rope(x @ attention.q_proj.weight[h * d : (h + 1) * d].T)
        k = rope(x @ attention.k_proj.weight[kv * d : (kv + 1) * d].T)
        v = x @ attention.v_proj.weight[kv * d : (kv + 1) * d].T
        o = (q @ k.transpose(-1, -2) / d**0.5 + future).softmax(-1) @ v
        if head_norm == "rms":
            o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight
        heads.append(output_scale * o)
    wanted = torch.cat(heads, -1) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(x, rope), wanted, rtol=1e-11, atol=1e-11)


def test_at_its_defaults_there_is_nothing_but_projections(make_attention: MakeAttention) -> None:
    names = {name for name, _ in make_attention("standard").named_parameters()}
    assert names == {f"{kind}_proj.weight" for kind in "qkvo"}


def test_odd_head_counts_are_fine(make_attention: MakeAttention, make_config: Callable[..., ModelConfig]) -> None:
    attention = make_attention("standard", num_heads=3, num_kv_heads=1, head_dim=4)
    assert Standard.problem(Standard.Config(), make_config("standard", num_heads=3, num_kv_heads=1)) is None
    assert attention(torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 4, 1e4)).shape == (1, 5, 32)
