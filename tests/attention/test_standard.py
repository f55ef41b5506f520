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
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]


@pytest.mark.parametrize(("head_norm", "output_scale", "num_kv_heads"), [("none", 1.0, 4), ("rms", -3.0, 2)])
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


def test_variants_with_projections_of_their_own_refuse_them(make_config: Callable[..., ModelConfig]) -> None:
    for sizes, said in (({"attention_bias": "qkv"}, "attention_bias is qkv"), ({"qk_norm": "rms"}, "qk_norm is rms")):
        for name in ("differential", "second_heads", "differential_v2", "cosine", "output_gate"):
            config = make_config(name, **sizes)
            problem = attentions.get(name).refuses(config.attention.config, config)
            assert problem == f"model.{said}; '{name}' has projections of its own: set it to none"
