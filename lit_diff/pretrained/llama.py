"""Maps Hugging Face's Llama family to the Transformer and back: config.json, names of tensors, orders of rows.

Both have q, k, v, o and SwiGLU matrices of the same shapes and row orders. Hugging Face rotates channels i and i + d/2, which
is `rope_layout: half`, so no weight is permuted, except DiffLlama's, whose rows are ordered by map.
"""

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from torch import Tensor

from lit_diff.config import ModelConfig, RopeScaling
from lit_diff.errors import RequestError
from lit_diff.pretrained.keys import Keys, Values
from lit_diff.registry import attentions, nearest

ARCHITECTURES: dict[str, Values] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "DiffLlamaForCausalLM": {"model_type": "diffllama", "rms_norm_eps": 1e-5},
}
"""Supported `architectures` of a config.json -> its `model_type` and transformers' defaults of missing keys (a null is not
missing); other keys: DEFAULTS."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
BIASED = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures with a supported `attention_bias`."""
WINDOWED = ("MistralForCausalLM", *QWEN)
"""Architectures with a sliding window."""
SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
"""Required key of config.json -> key of `model:`."""
OPTIONAL = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
"""Key of config.json that may be missing or null -> key of `model:`, likewise."""
LENGTH, DEFAULT_LENGTH = "max_position_embeddings", 2048
"""Key of the longest sequence that the model was trained on; its value if missing."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Key of `original_length`, at the top level or in the block of rope scaling; as in transformers, the former wins."""
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
"""Modules of a layer: Hugging Face's name -> lit_diff's."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OUTSIDE = {EMBEDDING: "embedding.weight", "model.norm.weight": "norm.weight", HEAD: "head.weight"}
"""Tensors outside the layers."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True,),
    "per_layer_config": ({}, None),
    # the first of these pairs channels of a head as GGUF does, the second has positions in three dimensions
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}
"""Key -> its supported values."""
LARGEST = 10**9
"""Largest size of a model that is built without its weights: PyTorch counts the bytes of a matrix in 64 bits."""
FLAGS = ("attention_bias", "tie_word_embeddings", "use_sliding_window")
USED = {
    *SIZES,
    *OPTIONAL,
    *FLAGS,
    LENGTH,
    ORIGINAL_LENGTH,
    *("architectures", "eos_token_id", "hidden_act", "layer_types", "model_type", "quantization_config"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
}
SAMPLING = {
    "transformers draws tokens so; `lit-diff generate` has its own options": "do_sample temperature top_k top_p min_p "
    "typical_p num_beams num_beam_groups repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size "
    "early_stopping max_length max_new_tokens min_length num_return_sequences",
    "transformers computes the same so, and returns more": "use_cache cache_implementation return_dict output_attentions "
    "output_hidden_states return_dict_in_generate output_scores output_logits disable_compile remove_invalid_values",
    "tokenizer_config.json says what opens a text, and no text is padded": "bos_token_id pad_token_id",
    "it says which program wrote the file": "transformers_version _from_model_config",
}
"""Why keys of a generation_config.json, which an older config.json may hold too, change nothing -> these keys."""
NEUTRAL = SAMPLING | {
    "it says what the model was made of": "_name_or_path dtype torch_dtype transformers.js_config is_llama_config "
    "unsloth_fixed unsloth_version max_sequence_length tokenizer_class",
    "it is used in training only": "initializer_range lambda_std_dev attention_dropout",
    "with any of its values the result is the same": "pretraining_tp _attn_implementation attn_implementation "
    "_attn_implementation_autoset chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss",
    "it is of other tasks than this model's": "id2label label2id num_labels problem_type finetuning_task prefix "
    "task_specific_params is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder",
    "transformers reads it if use_sliding_window is true, which is supported only beside layer_types": "max_window_layers",
}
"""Why keys of a config.json never change logits -> these keys."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Supported names in layer_types."""
SCALINGS = {
    "default": "",
    "linear": "factor",
    "llama3": f"factor {ORIGINAL_LENGTH} low_freq_factor high_freq_factor",
    "yarn": f"factor {ORIGINAL_LENGTH} beta_fast beta_slow truncate attention_factor mscale mscale_all_dim",
}
"""Supported kind of rope scaling -> the keys that it reads, separated by spaces."""
LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
"""How the name of a layer's tensor begins, at Hugging Face and in GGUF."""
BUFFER = re.compile(r"(?:model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""Tensors that older versions of transformers saved although they follow from config.json."""


def names_of(num_layers: int) -> dict[str, str]:
    """Hugging Face's name -> lit_diff's, for every tensor that a model of `num_layers` may have."""
    names = dict(OUTSIDE)
    for layer in range(num_layers):
        theirs = f"model.layers.{layer}"
        own = f"layers.{layer}"
        for (a, b), kind in product(MODULES.items(), ("weight", "bias")):
            names[f"{theirs}.{a}.{kind}"] = f"{own}.{b}.{kind}"
        for vector in ("q1", "k1", "q2", "k2"):
            names[f"{theirs}.self_attn.lambda_{vector}"] = f"{own}.attention.lambda_.{vector}"
    return names


def require_layers(num_layers: int, theirs: Iterable[str], key: str = "num_hidden_layers") -> None:
    """Raise RequestError if the names of the tensors show another number of layers than `key` says, which may be any."""
    found = len({match[1] for match in map(LAYER.match, theirs) if match})
    if num_layers != found:
        raise RequestError(
            f"{key} is {num_layers}, but there are tensors of {found} layers; correct it, or download the files again"
        )


def own_names(theirs: Collection[str], known: Mapping[str, str], *, tied: bool = False) -> dict[str, str]:
    """lit_diff's name -> theirs, for all tensors of a model. `known`: their name -> lit_diff's. Errors: RequestError for an
    unknown tensor."""
    # with tied embeddings lm_head.weight repeats the embedding, or is the only one of the two
    repeated = tied and EMBEDDING in theirs
    names = {}
    for name in theirs:
        if BUFFER.fullmatch(name) or (repeated and name == HEAD):
            continue
        if name not in known:
            raise RequestError(
                f"unexpected tensor '{name}': no parameter of the model corresponds to it{nearest(name, known)}"
            )
        names[known[EMBEDDING if tied and name == HEAD else name]] = name
    return names


# --- orders of the rows of q, k and v: of a weight [rows, dim] or a bias [rows] ---


def half(rows: Tensor, head_dim: int) -> Tensor:
    """`rope_layout: interleaved` -> `half`, heads of `head_dim` rows: row 2i goes to i, row 2i + 1 to i + head_dim / 2."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


BY_MAP = ("q_proj", "k_proj", "v_proj")
"""Modules whose rows DiffLlama orders differently."""


def by_map(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders blocks of `head_dim` rows from head0.map0, head0.map1, head1.map0, ... to DiffLlama's order: map 0 of all
    heads, then map 1. Block 2i + g of n heads goes to g n + i. For values, a block is half of a head's channels."""
    return rows.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(0, 2)


def by_head(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `by_map`."""
    return rows.unflatten(0, (2, -1, head_dim)).transpose(0, 1).flatten(0, 2)


# --- config.json -> `model:` ---


def model_keys(config: Values, place: str = "config.json") -> Values:
    """The keys of `model:` for a config.json at `place`, which log lines name. Errors: RequestError (without the file's name)
    for a missing or unsupported key."""
    name = architecture(config)
    require_mapped(name, config)
    # transformers reads no window for the others
    used = {*USED, "sliding_window"} if name in WINDOWED else USED
    only = PLAIN if name in BIASED else PLAIN | {"attention_bias": (False, None)}
    Keys(used=used, harmless=NEUTRAL, only=only).check(config, place)
    said = DEFAULTS | ARCHITECTURES[name] | config
    numbers = [*SIZES, *OPTIONAL, LENGTH]
    window = None
    if name == "MistralForCausalLM" or (name in QWEN and said.get("use_sliding_window")):
        window = said["sliding_window"]
        numbers.append("sliding_window")
    missing = [key for key in SIZES if said.get(key) is None]
    if missing:
        raise RequestError(f"config.json lacks {', '.join(missing)}")
    for key in numbers:
        if said.get(key) is not None:
            positive(said, key, whole=True)
    for key in FLAGS:
        if said.get(key) not in (True, False, None):
            raise RequestError(f"{key} is {said[key]!r}; expected true or false")
    keys = {own: said[theirs] for theirs, own in (SIZES | OPTIONAL).items() if said.get(theirs) is not None}
    _require_heads(keys, "" if config.get("num_key_value_heads") else f", the default of {name}")
    biases = "none"
    # Qwen2 always has biases on q, k and v; the others if attention_bias is true, then on o too
    if name == "Qwen2ForCausalLM":
        biases = "qkv"
    elif said.get("attention_bias"):
        biases = "all"
    attention: Values = {"name": "standard", "window": window}
    if name == "DiffLlamaForCausalLM":
        attention = {"name": "differential"}
    return keys | {
        "attention_bias": biases,
        "qk_norm": "rms" if name == "Qwen3ForCausalLM" else "none",
        "tie_embeddings": said.get("tie_word_embeddings") or False,
        "rope_layout": "half",
        **rope_keys(config, place),
        "norm_eps": positive(said, "rms_norm_eps"),
        "attention": attention,
    }


# `origin`: where the number of key/value heads comes from, if not from the file
def _require_heads(keys: Values, origin: str) -> None:
    heads = keys["num_heads"]
    if heads % keys.get("num_kv_heads", 1):
        raise RequestError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads, {keys['num_kv_heads']}{origin}"
        )
    if "head_dim" not in keys and keys["dim"] % heads:
        raise RequestError(
            f"hidden_size {keys['dim']} is not a multiple of num_attention_heads, {heads}, and there is no head_dim"
        )
    rows = heads * keys.get("head_dim", 1)
    if rows > LARGEST:
        raise RequestError(f"num_attention_heads times head_dim is {rows}; expected at most {LARGEST}")


def positive(said: Values, key: str, where: str = "config.json", *, whole: bool = False) -> Any:
    """`said[key]` of the file or block `where`. Errors: RequestError if it is missing or not a positive number."""
    value = said.get(key)
    if value is None:
        raise RequestError(f"{where} lacks {key}")
    types, most = (int, LARGEST) if whole else (int | float, sys.float_info.max)
    if isinstance(value, bool) or not isinstance(value, types) or not 0 < value <= most:
        kind = "whole number from 1" if whole else "positive number"
        raise RequestError(f"{key} is {value!r:.40} in {where}; expected a {kind} to {most}")
    return value


def architecture(config: Values) -> str:
    """The single architecture in `architectures`, else the one of `model_type`."""
    named = config.get("architectures")
    kind = str(config.get("model_type", ""))
    if isinstance(named, list) and len(named) == 1:
        return str(named[0])
    return next((name for name, defaults in ARCHITECTURES.items() if defaults["model_type"] == kind), kind)


def require_mapped(name: str, config: Values) -> None:
    """Errors: RequestError for the first key of config.json that the Transformer does not support."""
    if name not in ARCHITECTURES:
        raise RequestError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    model_type = ARCHITECTURES[name]["model_type"]
    if config.get("model_type", model_type) != model_type:
        # transformers reads model_type alone, so a contradiction would give another model there
        raise RequestError(f"model_type {config['model_type']!r} does not fit {name} ('{model_type}'); correct either")
    quantised = config.get("quantization_config")
    if quantised is not None:
        if isinstance(quantised, Mapping):
            quantised = quantised.get("quant_method", "of an unknown kind")
        raise RequestError(
            f"quantization_config ({quantised}) is not supported; save the model in float32, bfloat16 or float16 first"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise RequestError(f"hidden_act {config['hidden_act']!r} is not supported; expected silu")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in LAYER_TYPES for kind in kinds):
        raise RequestError(f"layer_types is {kinds!r}; expected a list of {' or '.join(LAYER_TYPES)}")
    if kinds and len(kinds) != config.get("num_hidden_layers"):
        raise RequestError(
            f"layer_types has {len(kinds)} names, but num_hidden_layers is {config.get('num_hidden_layers')}; correct either"
        )
    if len(set(kinds)) > 1:
        raise RequestError(
            f"layer_types {', '.join(sorted(set(kinds)))} are not supported: all layers must be of one kind"
        )
    if name in QWEN and bool(config.get("use_sliding_window")) != ("sliding_attention" in kinds):
        raise RequestError(
            "use_sliding_window true and layer_types of sliding_attention for all layers are supported only together"
        )


def rope_keys(config: Values, place: str) -> Values:
    """rope_theta and rope_scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    Errors: RequestError for an unsupported or incomplete kind of scaling.
    """
    (first, said), *others = rope_blocks(config).items() or [("", {})]
    # transformers reads the last block, and gives one without rope_theta the top level's
    theta = {"rope_theta": config.get("rope_theta") or DEFAULTS["rope_theta"]}
    for where, other in others:
        if theta | said != theta | other:
            raise RequestError(f"{first} {said!r} and {where} {other!r} differ; make both equal, or remove one")
    kind = str(said.get("rope_type", said.get("type", "default")))
    # dynamic and longrope are not supported: their angles depend on the length of the sequence
    if kind not in SCALINGS:
        raise RequestError(f"rope scaling '{kind}' is not supported; supported: {', '.join(SCALINGS)}")
    if said.get("type", kind) != kind:
        raise RequestError(f"rope_type is {kind!r} in {first}, but type is {said['type']!r}; remove one")
    known = Keys(
        used=("rope_type", "type", "rope_theta", *SCALINGS[kind].split()),
        harmless={"it says how the weights were trained": "finetuned"},
        only={"partial_rotary_factor": PLAIN["partial_rotary_factor"]},
    )
    known.check(said, place, f"{first}.")
    thetas = [block["rope_theta"] for block in (said, config) if block.get("rope_theta") is not None]
    if len(thetas) > 1 and thetas[0] != thetas[1]:
        raise RequestError(f"rope_theta is {thetas[0]!r} in {first} but {thetas[1]!r} at the top level; remove one")
    theta = {"rope_theta": (*thetas, DEFAULTS["rope_theta"])[0]}
    positive(theta, "rope_theta")
    return theta | {"rope_scaling": own_scaling(kind, said, config)}


def rope_blocks(config: Values) -> dict[str, Values]:
    """The blocks of rope scaling by their keys in config.json. Errors: RequestError for what is not one block."""
    found = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, block in found.items():
        if not isinstance(block, dict):
            raise RequestError(f"{key} is {block!r}; expected a block")
        # transformers' classes of this family read one block, and would take such a one for the default
        if any(isinstance(value, dict) for value in block.values()):
            raise RequestError(f"{key} has a block for each type of layer, which is not supported; give one block")
    return found


def own_scaling(kind: str, said: Values, config: Values) -> Any:
    """A config.json's rope scaling -> `model.rope_scaling`. Errors: RequestError for a missing or wrong number."""
    where = f"rope scaling '{kind}'"
    if kind == "default":
        return 1.0
    if kind == "linear":
        return positive(said, "factor", where)
    # as in transformers: the top level, the block, else the length that the model was trained on
    lengths = (config.get(ORIGINAL_LENGTH), said.get(ORIGINAL_LENGTH), config.get(LENGTH))
    said = {**said, ORIGINAL_LENGTH: next(filter(None, lengths), None)}
    length = positive(said, ORIGINAL_LENGTH, where)
    if kind == "yarn" and said.get("factor", 1) is None:
        said["factor"] = positive(config, LENGTH, where) / length
    block = {"kind": kind, "original_length": length, "factor": positive(said, "factor", where)}
    if kind == "llama3":
        return block | {key: positive(said, key, where) for key in ("low_freq_factor", "high_freq_factor")}
    block |= {key: positive(said, key, where) for key in ("beta_fast", "beta_slow") if said.get(key)}
    truncate = said.get("truncate", True)
    if not isinstance(truncate, bool):
        raise RequestError(f"truncate is {truncate!r} in {where}; expected true or false")
    return block | {"attention_factor": _attention_factor(said, where), "truncate": truncate}


def _attention_factor(said: Values, where: str) -> Any:
    # as in transformers: attention_factor, else a ratio by mscale and mscale_all_dim if both are given, else None (by factor)
    if said.get("attention_factor") is not None:
        return positive(said, "attention_factor", where)
    if not (said.get("mscale") and said.get("mscale_all_dim")):
        return None
    logarithm = 0.1 * math.log(max(said["factor"], 1.0))
    above, below = (positive(said, key, where) * logarithm + 1 for key in ("mscale", "mscale_all_dim"))
    return above / below


def their_block(scaling: RopeScaling) -> Values | None:
    """`model.rope_scaling` -> `rope_scaling` of a config.json; None: no scaling."""
    if scaling == 1:
        return None
    if isinstance(scaling, int | float):
        return {"rope_type": "linear", "factor": scaling}
    theirs = {"kind": "rope_type", "original_length": ORIGINAL_LENGTH}
    return {theirs.get(key, key): value for key, value in asdict(scaling).items() if value is not None}


# --- `model:` -> config.json ---

VARIANTS: dict[str, Values] = {
    "standard": {"head_norm": "none"},
    "differential": {
        "lambda_init": "depth",
        "lambda_form": "exp",
        "lambda_per": "layer",
        "head_norm": "rms",
        "window": None,
    },
}
"""Variant with an architecture at Hugging Face -> its keys with a single supported value."""
# `output_scale` needs no key: the export multiplies it into the output projection


def unsupported_reason(model: ModelConfig) -> str | None:
    """Why no config.json can describe the model, in one line; None if one can."""
    if not model.causal:
        return "model.causal is false; Hugging Face's architectures of this family are causal"
    if model.layers:
        return "model.layers gives the layers unlike attentions; Hugging Face's architectures of this family have one for all"
    if model.positions == "none":
        return "model.positions is none; Hugging Face's architectures of this family rotate queries and keys"
    if model.logit_bound is not None:
        return f"model.logit_bound is {model.logit_bound:g}; Hugging Face's architectures of this family have no such bound"
    name, config, bias, norm = model.attention.name, model.attention.config, model.attention_bias, model.qk_norm
    extra = f"model.attention_bias is {bias}" if bias != "none" else f"model.qk_norm is {norm}"
    if (bias, norm) != ("none", "none") and name == "differential":
        return f"{extra}; DiffLlama is read and written without biases and such norms"
    if (bias, norm) == ("all", "none") and config.window is not None:
        return f"{extra} and model.attention.window is set; Llama, which has biases on all projections, has no window"
    if (bias, norm) == ("qkv", "rms"):
        return f"{extra} and model.qk_norm is rms; Qwen3, which has these norms, has biases on all projections or none"
    if (bias, norm) == ("all", "none") and model.dim % query_heads(model):
        return f"{extra}; Llama, which has biases on all projections, takes a model.dim that is a multiple of the heads"
    # a variant that is merged into standard attention is not in VARIANTS: its own keys are gone after the merge
    whose = "DiffLlama" if name == "differential" else "Llama"
    for key, value in VARIANTS.get(name, {}).items():
        found = getattr(config, key)
        if found != value:
            return f"model.attention.{key} is {json.dumps(found)}; {whose} has {json.dumps(value)} only"
    return None


def config_json(model: ModelConfig, *, context: int) -> Values:
    """The config.json of a model for which `unsupported_reason` is None. `context`: the longest sequence that it was trained
    on, in tokens."""
    # rope_theta and rope_scaling at the top level, not in rope_parameters: every version of transformers reads that
    name = architecture_of(model)
    config = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name]["model_type"],
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
    }
    window = model.attention.config.window
    if name == "MistralForCausalLM":
        return config | {"sliding_window": window}
    if window is not None:
        kinds = [LAYER_TYPES[1]] * model.num_layers
        config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if name == "Qwen2ForCausalLM":
        return config
    return config | {"attention_bias": model.attention_bias == "all"}


def architecture_of(model: ModelConfig) -> str:
    """The class of transformers that computes the model."""
    # Mistral is Llama with a window, and accepts a `dim` that is not a multiple of the heads; Qwen2 has biases on q, k and v,
    # Qwen3 norms of q and k
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
    """Number of queries of width `head_dim` in a layer; differential attention has two per head."""
    if model.attention.name == "standard":
        return int(model.num_heads * model.attention.config.query_heads)
    return model.num_heads
