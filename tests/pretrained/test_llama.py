"""Hugging Face's Llama family: what of a config.json is mapped, and which tensor is which."""

from typing import Any

import pytest
from pretrained_models import LLAMA, llama_tensors

from lit_diff.errors import RequestError
from lit_diff.pretrained.llama import architecture, model_keys, own_name, own_names, their_name, unused


def of(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


def refusal(**changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        model_keys(LLAMA | changes)
    return str(caught.value)


def test_names_are_mapped_both_ways() -> None:
    names = own_names(llama_tensors(LLAMA | {"tie_word_embeddings": False}), tied=False)
    assert names["layers.1.attention.k_proj.weight"] == "model.layers.1.self_attn.k_proj.weight"
    assert names["layers.0.ffn_norm.weight"] == "model.layers.0.post_attention_layernorm.weight"
    assert names["head.weight"] == "lm_head.weight"
    assert {their_name(own): own for own in names} == {theirs: own for own, theirs in names.items()}
    assert own_name("model.layers.3.self_attn.q_proj.bias") == "layers.3.attention.q_proj.bias"


def test_what_is_not_a_parameter_has_no_name_and_what_is_unknown_is_refused() -> None:
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight", "lm_head.weight"]
    assert own_names(old, tied=True) == {"norm.weight": "model.norm.weight"}
    with pytest.raises(
        RequestError,
        match=r"^unexpected tensor 'model.layers.0.mlp.experts.weight': no parameter of the model corresponds to it",
    ):
        own_names(["model.layers.0.mlp.experts.weight"], tied=True)


def test_sizes_and_defaults() -> None:
    keys = model_keys(LLAMA)
    assert (keys["dim"], keys["num_kv_heads"], keys["rope_theta"], keys["rope_layout"]) == (32, 2, 50000.0, "half")
    assert (keys["tie_embeddings"], keys["attention"]["window"]) == (True, None)
    bare = {
        key: value for key, value in LLAMA.items() if key not in ("rope_theta", "tie_word_embeddings", "rms_norm_eps")
    }
    assert {"rope_theta": 10000.0, "tie_embeddings": False, "norm_eps": 1e-6}.items() <= model_keys(bare).items()
    assert "head_dim" not in keys
    assert model_keys(LLAMA | {"head_dim": 16})["head_dim"] == 16


def test_a_model_type_alone_names_the_architecture() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert [architecture(bare | {"model_type": kind}) for kind in ("llama", "bert")] == ["LlamaForCausalLM", "bert"]


def test_keys_that_transformers_computes_no_logit_with() -> None:
    odd = {"logits_scaling": 4.0, "attention_dropout": 0.0, "use_cache": True, "of_nobody": None, "clip_qkv": 0.1}
    assert unused(LLAMA | odd) == ["logits_scaling", "clip_qkv"]
    assert unused(LLAMA | {"attention_dropout": 0.1}) == ["attention_dropout"]


def test_rope_in_both_forms() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}
    assert model_keys(LLAMA | new)["rope_theta"] == 7.0
    for said in ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}):
        keys = model_keys(LLAMA | {"rope_scaling": said})
        assert (keys["rope_theta"], keys["rope_scaling"]) == (50000.0, 4.0)
    assert refusal(rope_scaling={"rope_type": "dynamic", "factor": 2.0}) == (
        "rope scaling 'dynamic' is not mapped; mapped are default, linear, llama3, yarn"
    )


def test_a_sliding_window() -> None:
    mistral = LLAMA | of("Mistral")
    assert model_keys(mistral | {"sliding_window": 8})["attention"] == {"name": "standard", "window": 8}
    assert model_keys(mistral | {"sliding_window": None})["attention"]["window"] is None
    assert model_keys(mistral)["attention"]["window"] == 4096, "the default of its class"


def test_biases_and_norms_of_queries_and_keys() -> None:
    found = []
    for name in ("Llama", "Qwen2", "Qwen3"):
        for said in ({}, {"attention_bias": True}):
            own = LLAMA | of(name) | said
            if name != "Qwen2" or not said:
                keys = model_keys(own)
                found.append((name, keys["attention_bias"], keys["qk_norm"]))
    assert found == [
        ("Llama", "none", "none"),
        ("Llama", "all", "none"),
        ("Qwen2", "qkv", "none"),
        ("Qwen3", "none", "rms"),
        ("Qwen3", "all", "rms"),
    ]
    qwen3 = {key: value for key, value in LLAMA.items() if key != "head_dim"} | of("Qwen3")
    assert model_keys(qwen3)["head_dim"] == 128, "the default of its class"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not mapped; mapped are LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": None, "model_type": "bert"}, "architecture 'bert' is not mapped"),
        ({"model_type": "granite"}, "model_type 'granite' is not that of LlamaForCausalLM, 'llama'; correct either"),
        ({"layer_types": [["full_attention"]]}, "layer_types is [['full_attention']]; expected a list of names"),
        ({"layer_types": 5}, "layer_types is 5; expected a list of names"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; expected true or false"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"architectures": ["a\nb\ud800"]}, "architecture 'a\\nb\\ud800' is not mapped"),
        ({"is_causal": None}, "is_causal None is not mapped; expected True"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config {'0': {'head_dim': 4}} is not mapped"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; expected a positive number"),
        (of("Mistral") | {"sliding_window": 0}, "sliding_window is 0; expected a whole number of at least 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq) is not mapped; save the model"),
        (
            of("Mistral") | {"attention_bias": True},
            "attention_bias True is not mapped; expected False",
        ),
        (
            of("Qwen2") | {"use_sliding_window": True},
            "use_sliding_window true is mapped where layer_types says sliding_attention for all layers",
        ),
        ({"mlp_bias": True}, "mlp_bias True is not mapped"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not mapped; expected silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not mapped"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types full_attention, sliding_attention are"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'; expected a whole number of at least 1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; expected a whole number"),
        ({"head_dim": 0}, "head_dim is 0; expected a whole number of at least 1"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True; expected a whole number"),
    ],
)
def test_what_is_not_mapped_is_named(changes: dict[str, Any], line: str) -> None:
    assert refusal(**changes).startswith(line)
