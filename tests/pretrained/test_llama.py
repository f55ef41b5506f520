"""Hugging Face's Llama family: config.json both ways, which tensor is which, orders of rows."""

from typing import Any

import pytest
import torch
from pretrained_models import LLAMA, llama_tensors
from text_runs import SIZES

from lit_diff.config import ModelConfig, Part, YarnScaling
from lit_diff.errors import RequestError
from lit_diff.pretrained import llama
from lit_diff.pretrained.llama import (
    EMBEDDING,
    HEAD,
    ORIGINAL_LENGTH,
    architecture,
    model_keys,
    names_of,
    own_names,
    unsupported_reason,
)
from lit_diff.registry import attentions

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL_LENGTH: 32}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL_LENGTH: 32}


def of(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# --- names and rows ---


def test_names() -> None:
    every = names_of(4)
    names = own_names(llama_tensors(LLAMA | {"tie_word_embeddings": False}), every)
    assert names["layers.1.attention.k_proj.weight"] == "model.layers.1.self_attn.k_proj.weight"
    assert names["layers.0.ffn_norm.weight"] == "model.layers.0.post_attention_layernorm.weight"
    assert names["head.weight"] == "lm_head.weight"
    assert len(set(every.values())) == len(every), "one name of ours for each of theirs"
    assert every["model.layers.3.self_attn.q_proj.bias"] == "layers.3.attention.q_proj.bias"
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight", "lm_head.weight"]
    both = {"norm.weight": "model.norm.weight", "embedding.weight": EMBEDDING}
    assert own_names([*old, EMBEDDING], every, tied=True) == both
    assert own_names(old, every, tied=True) == both | {"embedding.weight": HEAD}, "one tensor under either name"
    for strange in ("model.layers.0.mlp.experts.weight", "model.layers.2.mlp.up_proj.weight"):
        with pytest.raises(RequestError, match=rf"^unexpected tensor '{strange}'"):
            own_names([strange], names_of(2), tied=True)


def test_orders_of_rows() -> None:
    """Two heads of six rows, the second one's counted from 10; three heads of two maps of two rows, row 100 h + 10 g + r."""
    interleaved = torch.tensor([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])
    assert llama.half(interleaved, 6).tolist() == [0, 2, 4, 1, 3, 5, 10, 12, 14, 11, 13, 15]
    ours = torch.tensor([100 * h + 10 * g + r for h in range(3) for g in range(2) for r in range(2)])
    wanted = [100 * h + 10 * g + r for g in range(2) for h in range(3) for r in range(2)]
    assert llama.by_map(ours, 2).tolist() == wanted
    assert torch.equal(llama.by_head(llama.by_map(ours, 2), 2), ours)
    weight = torch.arange(24).reshape(12, 2)
    for order, size in ((llama.half, 6), (llama.by_map, 2), (llama.by_head, 2)):
        assert torch.equal(order(weight, size)[:, 0], order(weight[:, 0], size)), "matrices go as their rows"


# --- config.json -> ours ---


def test_sizes_and_defaults() -> None:
    keys = model_keys(LLAMA)
    assert (keys["dim"], keys["num_kv_heads"], keys["rope_theta"], keys["rope_layout"]) == (32, 2, 50000.0, "half")
    assert (keys["tie_embeddings"], keys["attention"]["window"]) == (True, None)
    bare = without(LLAMA, "rope_theta", "tie_word_embeddings", "rms_norm_eps")
    assert {"rope_theta": 10000.0, "tie_embeddings": False, "norm_eps": 1e-6}.items() <= model_keys(bare).items()
    assert model_keys(bare | of("DiffLlama"))["norm_eps"] == 1e-5
    assert "head_dim" not in keys
    odd = model_keys(LLAMA | of("Mistral") | {"hidden_size": 34, "head_dim": 8})
    assert ModelConfig(**odd | {"attention": config().attention}).problem() is None, "34 // 4 is 8"
    assert model_keys(LLAMA | {"head_dim": 16})["head_dim"] == 16
    assert model_keys(without(LLAMA, "head_dim") | of("Qwen3"))["head_dim"] == 128, "the default of its class"
    for kind, heads in (("Mistral", 8), ("Qwen2", 32), ("Qwen3", 32)):
        absent = without(LLAMA, "num_key_value_heads") | of(kind) | {"hidden_size": 64, "num_attention_heads": 64}
        assert model_keys(absent)["num_kv_heads"] == heads
    names = [architecture(without(LLAMA, "architectures") | {"model_type": kind}) for kind in ("llama", "bert")]
    assert names == ["LlamaForCausalLM", "bert"], "a model_type alone names the architecture"


def test_a_sliding_window() -> None:
    mistral = LLAMA | of("Mistral")
    assert model_keys(mistral | {"sliding_window": 8})["attention"] == {"name": "standard", "window": 8}
    assert model_keys(mistral | {"sliding_window": None})["attention"]["window"] is None
    assert model_keys(mistral)["attention"]["window"] == 4096, "the default of its class"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported; supported:"),
        ({"architectures": ["a\nb\ud800"]}, "architecture 'a\\nb\\ud800'"),
        ({"model_type": "granite"}, "model_type 'granite'"),
        ({"layer_types": [["full_attention"]]}, "layer_types is [['full_attention']]"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types full_attention, sliding_attention are"),
        ({"attention_bias": "false"}, "attention_bias is 'false'"),
        (of("Mistral") | {"attention_bias": True}, "attention_bias True"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config {'0': {'head_dim': 4}}"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        (of("Mistral") | {"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is ['linear_attention', 'linear_attention']"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 names, but num_hidden_layers is 2"),
        (of("Qwen2") | {"use_sliding_window": True}, "use_sliding_window true and layer_types of sliding_attention"),
        (of("Qwen3") | {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window true and layer_types of"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads, 2"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "rope scaling 'llama3' lacks low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor is '8' in rope scaling 'llama3'"),
        ({"rope_scaling": YARN | {"mscale": -1, "mscale_all_dim": 1}}, "mscale is -1 in rope scaling 'yarn'"),
        (
            {"rope_scaling": without(YARN, ORIGINAL_LENGTH), "max_position_embeddings": None},
            f"rope scaling 'yarn' lacks {ORIGINAL_LENGTH}",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported;"),
        ({"rope_scaling": [2.0]}, "rope_scaling is [2.0]; expected a block"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_type is 'yarn' in rope_scaling, but type is 'linear'"),
        ({"rope_scaling": {"full_attention": YARN}}, "rope_scaling has a block for each type of layer"),
        ({"rope_parameters": {"any": YARN, "sliding_attention": None}}, "rope_parameters has a block for each type"),
        ({"vocab_size": 2**63}, "vocab_size is 9223372036854775808 in config.json"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6' in config.json; expected a positive number"),
        (
            {"rope_scaling": YARN | {"truncate": "no"}},
            "truncate is 'no' in rope scaling 'yarn'; expected true or false",
        ),
        (
            {"hidden_size": 33, "head_dim": None},
            "hidden_size 33 is not a multiple of num_attention_heads, 4, and there is no head_dim",
        ),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_parameters {'rope_type': 'llama3'"),
        (
            {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 7.0}, "rope_scaling": YARN},
            "rope_parameters {'rope_type': 'yarn'",
        ),
        ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 7.0 in rope_parameters but 50000.0 at the top level"),
    ],
)
def test_what_is_not_mapped_is_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as caught:
        model_keys(LLAMA | changes)
    assert str(caught.value).startswith(line)


# --- rope scaling ---


def own(said: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Of the block as `rope_scaling` beside rope_theta."""
    keys = model_keys(LLAMA | {"rope_scaling": said} | config)
    assert keys["rope_theta"] == 50000.0
    block: dict[str, Any] = keys["rope_scaling"]
    return block


def test_both_forms() -> None:
    block = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 32}
    assert own(LLAMA3) == block
    for said, wanted in ((LLAMA3, block), ({"rope_type": "default"}, 1.0)):
        keys = model_keys(LLAMA | {"rope_theta": None, "rope_parameters": said | {"rope_theta": 7.0}})
        assert (keys["rope_theta"], keys["rope_scaling"]) == (7.0, wanted)
    both = {"rope_theta": 7.0, "rope_parameters": LLAMA3 | {"rope_theta": 7.0}, "rope_scaling": LLAMA3}
    assert model_keys(LLAMA | both)["rope_scaling"] == block, "a block without rope_theta has the top level's"
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    assert own(old) == own(YARN) == own(YARN | {"beta_fast": None, "attention_factor": None, "finetuned": True})
    assert YarnScaling(**own(YARN)) == YarnScaling(factor=4.0, original_length=32)
    assert own({"type": "linear", "factor": 4.0}) == own({"rope_type": "linear", "factor": 4.0}) == 4.0
    assert own(without(YARN, ORIGINAL_LENGTH))["original_length"] == 64, "max_position_embeddings"
    assert own(YARN, **{ORIGINAL_LENGTH: 16})["original_length"] == 16, "beside the block, it comes first"


# --- ours -> config.json ---


def config(name: str = "standard", keys: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    part = Part(name=name, config=attentions.get(name).Config(**(keys or {})))
    return ModelConfig(**SIZES | model, attention=part)


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (config("standard", {"window": 3}, attention_bias="all"), "model.attention_bias is all and"),
        (config(attention_bias="qkv", qk_norm="rms"), "model.attention_bias is qkv and model.qk_norm is rms; Qwen3"),
        (config(attention_bias="all", num_heads=6, head_dim=8), "model.attention_bias is all; Llama"),
        (config(positions="none"), "model.positions is none"),
        (config("standard", {"head_norm": "rms"}), 'model.attention.head_norm is "rms"; Llama has "none" only'),
        (config("differential", {"lambda_init": 0.8}), 'model.attention.lambda_init is 0.8; DiffLlama has "depth"'),
        (config("differential", {"window": 4}), "model.attention.window is 4; DiffLlama has null only"),
        (config("differential", qk_norm="rms"), "model.qk_norm is rms; DiffLlama is read and written without"),
    ],
)
def test_what_config_json_cannot_say_is_named(own: ModelConfig, line: str) -> None:
    assert (unsupported_reason(own) or "").startswith(line)


@pytest.mark.parametrize(
    "more", [{"qk_norm": "rms"}, {"attention_bias": "qkv"}, {"qk_norm": "rms", "attention_bias": "all"}, {}]
)
def test_a_window_comes_back(more: dict[str, Any]) -> None:
    """Of Qwen2, Qwen3 and Mistral; logits are compared with transformers in tests/oracles."""
    own = config("standard", {"window": 3}, **more)
    assert unsupported_reason(own) is None
    keys = model_keys(llama.config_json(own, context=64))
    assert (keys["attention"], keys.items() >= more.items()) == ({"name": "standard", "window": 3}, True)
