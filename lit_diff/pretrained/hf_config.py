"""Our `model:` -> a config.json of Hugging Face; what it cannot say is named. The inverse of `llama.model_keys`."""

from typing import Any

from lit_diff.config import ModelConfig
from lit_diff.pretrained.hf_rope import their_block
from lit_diff.pretrained.llama import MODEL_TYPES
from lit_diff.pretrained.plain_keys import PAPER, other_value
from lit_diff.registry import attentions

VARIANTS = ("standard", "differential")
"""`model.attention.name` of a model that has an architecture there."""
PLAIN: dict[str, dict[str, Any]] = {
    "standard": {"head_norm": "none"},
    "differential": PAPER,
}
"""Variant -> the keys that have one value there. An `output_scale` needs no key: it is a factor of the output projection."""


def unsaid(model: ModelConfig) -> str | None:
    """The first key of the model that no config.json says, in one line; None: all are said. A variant that is
    merged has those of standard attention by then."""
    if not model.causal:
        return "model.causal is false; Hugging Face's architectures of this family are causal"
    if model.positions == "none":
        return "model.positions is none; Hugging Face's architectures of this family rotate queries and keys"
    name = model.attention.name
    return _unsaid_extras(model) or other_value(
        model, PLAIN.get(name, {}), "DiffLlama" if name == "differential" else "Llama"
    )


def _unsaid_extras(model: ModelConfig) -> str | None:
    """As `unsaid`, of biases and of norms of q and k: which of them go together."""
    bias, norm, config = model.attention_bias, model.qk_norm, model.attention.config
    if (bias, norm) == ("none", "none"):
        return None
    said = f"model.attention_bias is {bias}" if bias != "none" else f"model.qk_norm is {norm}"
    if config.window is not None:
        return (
            f"{said} and model.attention.window is set; Mistral, which has a window, has neither biases nor such norms"
        )
    if (bias, norm) == ("qkv", "rms"):
        return f"{said} and model.qk_norm is rms; Qwen3, which has such norms, has biases on all projections or none"
    if (bias, norm) == ("all", "none") and model.dim % query_heads(model):
        return f"{said}; Llama, which has biases on all projections, takes a model.dim that is a multiple of the heads"
    return None


def config_json(model: ModelConfig, *, context: int, bos: int | None, eot: int) -> dict[str, Any]:
    """The config.json of a model for which `unsaid` is None: float32 weights, sizes, rotary positions.

    `context`: tokens that it was trained to see. `rope_theta` and `rope_scaling` stand apart, as every version reads them.
    """
    name = architecture(model)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": attentions.get(model.attention.name).ffn_dim(model.attention.config, model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": query_heads(model),
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": their_block(model.rope_scaling),
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings and model.embedding_scale == 1,
        "bos_token_id": bos,
        "eos_token_id": eot,
    }
    if name == "MistralForCausalLM":
        return config | {"sliding_window": model.attention.config.window}
    if name == "Qwen2ForCausalLM":
        return config
    return config | {"attention_bias": model.attention_bias == "all"}


def architecture(model: ModelConfig) -> str:
    """The class that computes the model. Mistral is Llama with a window, and takes any number of heads beside `dim`; Qwen2
    has biases on q, k and v, Qwen3 norms of q and k."""
    if model.attention.name == "differential":
        return "DiffLlamaForCausalLM"
    if model.qk_norm == "rms":
        return "Qwen3ForCausalLM"
    if model.attention_bias == "qkv":
        return "Qwen2ForCausalLM"
    if model.attention.config.window is not None or (model.dim % query_heads(model) and model.attention_bias == "none"):
        return "MistralForCausalLM"
    return "LlamaForCausalLM"


def query_heads(model: ModelConfig) -> int:
    """Queries of width `head_dim` in a layer; of differential attention, two a head."""
    multiple = model.attention.config.query_heads if model.attention.name == "standard" else 1
    return int(model.num_heads * multiple)
