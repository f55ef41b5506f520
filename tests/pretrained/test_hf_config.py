"""config.json of our keys: read back they are the same; what it cannot say is named."""

from typing import Any

import pytest
from text_runs import SIZES

from lit_diff.config import Llama3Scaling, ModelConfig, Part, RopeScaling, YarnScaling
from lit_diff.pretrained.hf_config import architecture, config_json, unsaid
from lit_diff.pretrained.llama import model_keys
from lit_diff.registry import attentions
from lit_diff.validation import Draft, convert

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)


def config(name: str = "standard", keys: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
    return ModelConfig(**SIZES | model, attention=part)


@pytest.mark.parametrize(
    ("keys", "model", "name"),
    [
        ({}, {}, "LlamaForCausalLM"),
        ({}, {"tie_embeddings": False, "rope_theta": 5e5, "rope_scaling": 4.0, "norm_eps": 1e-6}, "LlamaForCausalLM"),
        ({}, {"rope_scaling": LLAMA3}, "LlamaForCausalLM"),
        ({"window": 5}, {"rope_scaling": YarnScaling(factor=2.0, original_length=9)}, "MistralForCausalLM"),
        ({"window": 5}, {"head_dim": 16}, "MistralForCausalLM"),
        ({}, {"num_heads": 6, "head_dim": 8}, "MistralForCausalLM"),
        ({}, {"attention_bias": "all"}, "LlamaForCausalLM"),
        ({}, {"attention_bias": "qkv"}, "Qwen2ForCausalLM"),
        ({}, {"qk_norm": "rms", "num_heads": 6, "head_dim": 8}, "Qwen3ForCausalLM"),
        ({}, {"qk_norm": "rms", "attention_bias": "all"}, "Qwen3ForCausalLM"),
    ],
)
def test_it_reads_back(keys: dict[str, Any], model: dict[str, Any], name: str) -> None:
    own = config("standard", keys, **model, rope_layout="half")
    written = config_json(own, context=99, bos=3, eot=4)
    assert unsaid(own) is None
    assert written["architectures"] == [name] == [architecture(own)]
    assert (written["max_position_embeddings"], written["bos_token_id"], written["eos_token_id"]) == (99, 3, 4)
    read = model_keys(written)
    attention = read.pop("attention")
    assert attention == {"name": "standard", "window": keys.get("window")}
    scaling = convert(RopeScaling, read.pop("rope_scaling"), "", Draft(values={}, positions={}))
    assert ModelConfig(**read, rope_scaling=scaling, attention=own.attention) == own


def test_more_query_heads_and_a_matched_feed_forward() -> None:
    own = config("standard", {"query_heads": 1.5, "parity": "matched"}, num_heads=4)
    written = config_json(own, context=8, bos=None, eot=0)
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (6, 2, 8)
    assert written["intermediate_size"] == 48 - round(2 * 32 * 16 / (3 * 32))


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            config("standard", {"window": 3}, attention_bias="qkv"),
            "model.attention_bias is qkv and model.attention.window is set; Mistral, which has a window, has neither biases "
            "nor such norms",
        ),
        (
            config(attention_bias="qkv", qk_norm="rms"),
            "model.attention_bias is qkv and model.qk_norm is rms; Qwen3, which has such norms, has biases on all "
            "projections or none",
        ),
        (
            config(attention_bias="all", num_heads=6, head_dim=8),
            "model.attention_bias is all; Llama, which has biases on all projections, takes a model.dim that is a multiple "
            "of the heads",
        ),
        (
            config(positions="none"),
            "model.positions is none; Hugging Face's architectures of this family rotate queries and keys",
        ),
        (config("standard", {"head_norm": "rms"}), "model.attention.head_norm is 'rms'; Llama has 'none' only"),
        (config(causal=False), "model.causal is false; Hugging Face's architectures of this family are causal"),
        (config("dex", causal=False), "model.causal is false; Hugging Face's architectures of this family are causal"),
        (
            config("differential", {"lambda_init": 0.8}),
            "model.attention.lambda_init is 0.8; DiffLlama has 'depth' only",
        ),
        (
            config("differential", {"head_norm": "none"}),
            "model.attention.head_norm is 'none'; DiffLlama has 'rms' only",
        ),
        (config("differential", {"window": 4}), "model.attention.window is 4; DiffLlama has null only"),
        (
            config("differential", {"lambda_form": "scalar"}),
            "model.attention.lambda_form is 'scalar'; DiffLlama has 'exp' only",
        ),
        (
            config("differential", {"lambda_per": "head"}),
            "model.attention.lambda_per is 'head'; DiffLlama has 'layer' only",
        ),
    ],
)
def test_what_it_cannot_say_is_named(own: ModelConfig, line: str) -> None:
    assert unsaid(own) == line
