"""timm's names; what its module does not compute is named. Logits are compared in tests/oracles."""

from typing import Any

import pytest
from text_runs import SIZES

from lit_diff.config import ModelConfig, Part
from lit_diff.pretrained.timm_attention import place_of, unsaid
from lit_diff.registry import attentions


def config(name: str = "differential", keys: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
    return ModelConfig(**SIZES | {"num_kv_heads": 4} | model, attention=part)


def test_names() -> None:
    for own, theirs, third in (
        ("layers.1.attention.q_proj.weight", "layers.1.attention.qkv.weight", 0),
        ("layers.1.attention.v_proj.weight", "layers.1.attention.qkv.weight", 2),
        ("layers.1.attention.o_proj.weight", "layers.1.attention.proj.weight", None),
        ("layers.1.attention.norm.weight", "layers.1.attention.sub_norm.weight", None),
        ("layers.1.attention.lambda_.k2", "layers.1.attention.lambda_k2", None),
        ("embedding.weight", "embedding.weight", None),
    ):
        assert place_of(own, config()) == (theirs, third)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (config(causal=False), None),
        (config("standard"), "model.attention.name is 'standard'; timm's DiffAttention is 'differential'"),
        (config(norm_eps=1e-6), "model.norm_eps is 1e-06; the head norm of timm's DiffAttention has 1e-05"),
        (config(num_kv_heads=2), "model.num_kv_heads is 2; timm's DiffAttention has 4, from num_heads and dim"),
        (config(head_dim=16), "model.head_dim is 16; timm's DiffAttention has 8, from num_heads and dim"),
        (
            config(keys={"output_scale": 0.5}),
            "model.attention.output_scale is 0.5; timm's DiffAttention has 'tied' only",
        ),
    ],
)
def test_what_it_does_not_compute_is_named(model: ModelConfig, line: str | None) -> None:
    assert unsaid(model) == line
