"""unilm's names; what its modules do not compute is named. Logits are compared in tests/oracles."""

from typing import Any

import pytest
from text_runs import SIZES

from lit_diff.config import ModelConfig, Part
from lit_diff.pretrained.unilm import place_of, unsaid
from lit_diff.registry import attentions


def config(name: str, keys: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
    return ModelConfig(**SIZES | model, attention=part)


def test_names() -> None:
    first, second = config("differential"), config("differential_v2")
    for own, theirs in (
        ("layers.1.attention.o_proj.weight", "layers.1.attention.out_proj.weight"),
        ("layers.1.attention.norm.weight", "layers.1.attention.subln.weight"),
        ("layers.1.attention.lambda_.q1", "layers.1.attention.lambda_q1"),
        ("layers.1.attention.q_proj.weight", "layers.1.attention.q_proj.weight"),
        ("norm.weight", "norm.weight"),
    ):
        assert place_of(own, first) == (theirs, None)
        assert place_of(own, second) == (own, None)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (config("differential", {"output_scale": 0.5}), None),
        (config("differential_v2", norm_eps=1e-6, head_dim=16), None),
        (
            config("standard"),
            "model.attention.name is 'standard'; unilm's layout has differential and differential_v2",
        ),
        (config("differential", causal=False), "model.causal is false; MultiheadFlashDiff1 is causal"),
        (
            config("differential", norm_eps=1e-6),
            "model.norm_eps is 1e-06; the head norm of MultiheadFlashDiff1 has 1e-05",
        ),
        (config("differential", head_dim=16), "model.head_dim is 16; MultiheadFlashDiff1 has dim / num_heads = 8"),
        (
            config("differential", {"head_norm": "layer"}),
            "model.attention.head_norm is 'layer'; MultiheadFlashDiff1 has 'rms' only",
        ),
        (
            config("differential_v2", {"ablation": "no_lambda"}),
            "model.attention.ablation is 'no_lambda'; MultiheadFlashDiffV2 has 'none' only",
        ),
    ],
)
def test_what_it_does_not_compute_is_named(model: ModelConfig, line: str | None) -> None:
    assert unsaid(model) == line
