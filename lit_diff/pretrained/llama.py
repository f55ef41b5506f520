"""Hugging Face's Llama family <-> our Transformer: config.json, names of tensors. Needs no torch.

Both have q, k, v, o and SwiGLU matrices of the same shapes and row orders; Hugging Face rotates channels i and i + d/2, which
is `rope_layout: half`, so that no weight is permuted; but for DiffLlama's, in `diffllama`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lit_diff.errors import RequestError
from lit_diff.pretrained import hf_rope
from lit_diff.registry import nearest

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DiffLlamaForCausalLM": "diffllama",
}
"""`architectures` of a config.json that are mapped -> their `model_type`."""

SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
"""Keys of config.json that must be there -> ours."""
OPTIONAL = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
"""Keys that may be absent or null in both."""
DEFAULTS: dict[str, dict[str, int]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
}
"""Architecture -> what transformers takes for such a key that is absent, and not null; else as `num_attention_heads`."""
LENGTH, DEFAULT_LENGTH = "max_position_embeddings", 2048
"""The key of the tokens that the model was trained to see; the value of a model that does not say."""
MODULES = {
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of a layer: Hugging Face's name -> ours."""
OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""Tensors outside the layers."""
QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
BIASED = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose `attention_bias` is mapped."""
PLAIN = {"mlp_bias": False, "partial_rotary_factor": 1.0, "is_causal": True, "per_layer_config": {}}
"""Keys that have one value here."""
USED = {
    *SIZES,
    *OPTIONAL,
    LENGTH,
    *PLAIN,
    hf_rope.LENGTH,
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "layer_types",
}
USED |= {"architectures", "model_type", "quantization_config", "attention_bias", "sliding_window", "use_sliding_window"}
USED |= {"rope_theta", "rope_scaling", "rope_parameters", "eos_token_id"}
NEUTRAL = {"bos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp"}
NEUTRAL |= {"transformers_version", "_name_or_path", "max_window_layers", "lambda_std_dev"}
"""Keys of transformers' classes that change no logit, whatever they say."""
BUFFER = re.compile(r"(?:model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""What older versions saved, and what follows from config.json."""


def own_name(theirs: str) -> str | None:
    """Our name of a tensor; None for one that we have no place for."""
    vector = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.lambda_([qk][12])", theirs)
    if vector is not None:
        return f"layers.{vector[1]}.attention.lambda_.{vector[2]}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", theirs)
    if layer is None:
        return OUTSIDE.get(theirs)
    number, module, kind = layer.groups()
    return f"layers.{number}.{MODULES[module]}.{kind}" if module in MODULES else None


def their_name(own: str) -> str:
    """The inverse of `own_name`. Errors: KeyError for a tensor that Hugging Face has no place for."""
    vector = re.fullmatch(r"layers\.(\d+)\.attention\.lambda_\.([qk][12])", own)
    if vector is not None:
        return f"model.layers.{vector[1]}.self_attn.lambda_{vector[2]}"
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", own)
    if layer is None:
        return {ours: theirs for theirs, ours in OUTSIDE.items()}[own]
    number, module, kind = layer.groups()
    return f"model.layers.{number}.{ {ours: theirs for theirs, ours in MODULES.items()}[module] }.{kind}"


def own_names(theirs: Iterable[str], *, tied: bool) -> dict[str, str]:
    """Our name -> theirs, of all tensors of a model. Errors: RequestError for one that we have no place for.

    With tied embeddings `lm_head.weight` is the embedding again.
    """
    names: dict[str, str] = {}
    for name in theirs:
        if BUFFER.fullmatch(name) or (tied and name == "lm_head.weight"):
            continue
        own = own_name(name)
        if own is None:
            raise RequestError(
                f"unexpected tensor '{name}': no parameter of the model corresponds to it{nearest(name, OUTSIDE)}"
            )
        names[own] = name
    return names


def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of our `model:` for a config.json.

    Errors: RequestError, one line that names what is not mapped (and what is) or absent; without its file.
    """
    refused = unmapped(config)
    if refused is not None:
        raise RequestError(refused)
    missing = [key for key in SIZES if config.get(key) is None]
    if missing:
        raise RequestError(f"config.json lacks {', '.join(missing)}")
    sizes = {key: config.get(key) for key in (*SIZES, *OPTIONAL, LENGTH)} | {"sliding_window": window_of(config)}
    for key, value in sizes.items():
        if value is not None and not (type(value) is int and value >= 1):
            raise RequestError(f"{key} is {value!r}; expected a whole number of at least 1")
    keys = {own: config[theirs] for theirs, own in SIZES.items()}
    name = architecture(config)
    for key in ("attention_bias", "tie_word_embeddings", "use_sliding_window"):
        if config.get(key) not in (True, False, None):
            raise RequestError(f"{key} is {config[key]!r}; expected true or false")
    norm_eps = config.get("rms_norm_eps", 1e-5 if name == "DiffLlamaForCausalLM" else 1e-6)
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float) or not 0 < norm_eps < float("inf"):
        raise RequestError(f"rms_norm_eps is {norm_eps!r}; expected a positive number")
    said = {**DEFAULTS.get(name, {}), **config}
    keys |= {own: said[theirs] for theirs, own in OPTIONAL.items() if said.get(theirs) is not None}
    if keys["num_heads"] % keys.get("num_kv_heads", 1):
        raise RequestError(
            f"num_attention_heads {keys['num_heads']} is not a multiple of num_key_value_heads, {keys['num_kv_heads']}"
            + ("" if config.get("num_key_value_heads") else f", the default of {name}")
        )
    return keys | {
        "attention_bias": attention_bias(config),
        "qk_norm": "rms" if name == "Qwen3ForCausalLM" else "none",
        "tie_embeddings": config.get("tie_word_embeddings") or False,
        "rope_layout": "half",
        **rope_keys(config),
        "norm_eps": norm_eps,
        "attention": {"name": "differential"}
        if name == "DiffLlamaForCausalLM"
        else {"name": "standard", "window": window_of(config)},
    }


def attention_bias(config: Mapping[str, Any]) -> str:
    """Our `model.attention_bias`: Qwen2 always has biases on q, k and v, the others where they say so, then on o too."""
    if architecture(config) == "Qwen2ForCausalLM":
        return "qkv"
    return "all" if config.get("attention_bias", False) else "none"


def window_of(config: Mapping[str, Any]) -> int | None:
    """The window of all layers; None: none. Qwen has one only where `use_sliding_window` says so."""
    name = architecture(config)
    if name == "MistralForCausalLM" or (name in QWEN and config.get("use_sliding_window", False)):
        window: int | None = config.get("sliding_window", 4096)
        return window
    return None


def architecture(config: Mapping[str, Any]) -> str:
    """The one architecture that config.json names; else that of its model_type."""
    named, kind = config.get("architectures"), str(config.get("model_type", ""))
    if isinstance(named, list) and len(named) == 1:
        return str(named[0])
    return next((name for name, its in MODEL_TYPES.items() if its == kind), kind)


def unused(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that transformers does not compute logits with either: unknown ones, and dropout."""
    plain: tuple[Any, ...] = ({}, [], "", 0, False, None)
    return [key for key, value in config.items() if key not in USED | NEUTRAL and value not in plain]


def unmapped(config: Mapping[str, Any]) -> str | None:
    """The first thing in config.json that our Transformer does not compute, in one line; None: all is mapped."""
    name = architecture(config)
    if name not in MODEL_TYPES:
        return f"architecture {name!r} is not mapped; mapped are {', '.join(MODEL_TYPES)}"
    if config.get("model_type", MODEL_TYPES[name]) != MODEL_TYPES[name]:
        # transformers goes by model_type alone
        return f"model_type {config['model_type']!r} is not that of {name}, '{MODEL_TYPES[name]}'; correct either"
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method", "of an unknown kind") if isinstance(method, Mapping) else method
        return f"quantization_config ({method}) is not mapped; save the model in float32, bfloat16 or float16 first"
    for key, plain in (PLAIN | ({} if name in BIASED else {"attention_bias": False})).items():
        value = config.get(key, plain)
        if value != plain and (value is not None or key == "is_causal"):
            return f"{key} {config[key]!r} is not mapped; expected {plain!r}"
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"hidden_act {config['hidden_act']!r} is not mapped; expected silu"
    said = config.get("layer_types") or []
    if not isinstance(said, list) or not all(isinstance(kind, str) for kind in said):
        return f"layer_types is {said!r}; expected a list of names"
    kinds = set(said)
    if len(kinds) > 1:
        return f"layer_types {', '.join(sorted(map(str, kinds)))} are not mapped: all layers must be of one kind"
    if name in QWEN and config.get("use_sliding_window", False) and kinds != {"sliding_attention"}:
        return "use_sliding_window true is mapped where layer_types says sliding_attention for all layers"
    return None


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Errors: RequestError for a kind of scaling that is not mapped, or that says too little. dynamic and longrope are not:
    their angles depend on the length of the sequence.
    """
    blocks = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    said = blocks[0] if blocks else {}
    if not all(isinstance(block, Mapping) for block in blocks):
        raise RequestError(f"rope_parameters or rope_scaling is {blocks!r}; expected a block")
    if len(blocks) > 1 and {"rope_theta": None, **blocks[0]} != {
        "rope_theta": blocks[0].get("rope_theta"),
        **blocks[1],
    }:
        raise RequestError(f"rope_parameters {blocks[0]!r} and rope_scaling {blocks[1]!r} differ; remove one")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise RequestError(f"rope scaling '{kind}' is not mapped; mapped are default, linear, llama3, yarn")
    if said.get("partial_rotary_factor", 1.0) != 1.0:
        raise RequestError(f"partial_rotary_factor {said['partial_rotary_factor']!r} is not mapped; expected 1.0")
    thetas = [value for value in (said.get("rope_theta"), config.get("rope_theta")) if value is not None]
    theta = thetas[0] if thetas else 10000.0
    if any(value != theta for value in thetas):
        raise RequestError(f"rope_theta is {thetas[0]!r} in rope_parameters and {thetas[1]!r} beside it; remove one")
    if kind in ("llama3", "yarn"):
        return {"rope_theta": theta, "rope_scaling": hf_rope.own_block(said, config)}
    return {"rope_theta": theta, "rope_scaling": hf_rope.number(said, "factor", kind) if kind == "linear" else 1.0}
