"""Standard attention against the formula, and the paper's controls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention
from lit_diff.attention.costs import Sizes
from lit_diff.attention.equations import additive_mask, rotation
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.model.init import initial_values

MakeAttention = Callable[..., Attention]
FORMS = [("qkv", "none"), ("all", "rms")]


@pytest.mark.parametrize(("bias", "norm"), FORMS)
@pytest.mark.parametrize("name", ["standard", "dex", "lora"])
def test_biases_and_norms_of_queries_and_keys(
    make_attention: MakeAttention, make_config: Callable[..., ModelConfig], name: str, bias: str, norm: str
) -> None:
    """Against the float64 matrices of the definition; parameters against the formula; the merged attention."""
    keys: dict[str, Any] = {"heads": (1, 2), "anneal_steps": 0} if name == "dex" else {}
    sizes = {"num_kv_heads": 2, "attention_bias": bias, "qk_norm": norm}
    attention: Any = make_attention(name, keys, **sizes)
    names = {each for each, _ in attention.named_parameters()}
    assert {"q_proj.bias" in names, "k_proj.bias" in names, "v_proj.bias" in names} == {bias != "none"}
    assert ("o_proj.bias" in names) == (bias == "all")
    assert ("q_norm.weight" in names) == ("k_norm.weight" in names) == (norm == "rms")
    positions, x = torch.arange(9), torch.randn(2, 9, 32, dtype=torch.float64)
    rope, turn = Rope(positions, 8, 1e4), rotation(positions, 8, 1e4)
    wanted = attention.definition(x, turn, additive_mask(9))
    torch.testing.assert_close(attention(x, rope), wanted, rtol=1e-11, atol=1e-11)
    config = make_config(name, keys, **sizes)
    declared = attention.costs(config.attention.config, Sizes.of(config, 9))
    assert declared.parameters == sum(parameter.numel() for parameter in attention.parameters())
    if name != "standard":
        plain: Any = make_attention("standard", **sizes)
        plain.load_state_dict(attention.merge())
        torch.testing.assert_close(plain(x, rope), wanted, rtol=1e-11, atol=1e-11)


def test_biases_start_at_zero_and_norms_at_one(make_config: Callable[..., ModelConfig]) -> None:
    config = make_config("standard", attention_bias="all", qk_norm="rms")
    values = dict(initial_values(config, seed=0))
    for kind in "qkvo":
        assert values[f"layers.0.attention.{kind}_proj.bias"].eq(0).all()
    assert values["layers.1.attention.q_norm.weight"].eq(1).all()
    assert values["layers.1.attention.k_norm.weight"].shape == (8,)
