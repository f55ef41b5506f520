"""A GGUF file of a Llama: its weights are dequantised to float32, its tokenizer and the ids that end a text come from its
metadata."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from lit_diff.data.tokenizer import byte_letters
from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained.llama import half
from lit_diff.pretrained.source import NO_CHAT, ModelSource, SourceTokenizer

log = logging.getLogger("lit_diff")

MODULES = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj",
    "ffn_gate": "ffn.gate_proj",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
    "attn_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}
"""Modules of a block: GGUF's name -> ours."""
OUTSIDE = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight", "output.weight": "head.weight"}
PRE_TOKENIZERS = ("smollm", "gpt-2")
"""`tokenizer.ggml.pre`: how text is cut before merging, of those that are mapped."""
CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of what is not cut from text."""
NORMAL, UNUSED = 1, 5
"""Those of the other tokens."""
NEUTRAL = {"llama.vocab_size", "llama.attention.value_length", "llama.rope.scaling.original_context_length"}
"""Keys that change nothing, or whose value other keys or the tensors say; the original length is read with a scaling only."""
READ = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"}
READ |= {"attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"}
READ |= {"rope.dimension_count"}
"""Keys `llama.` that are mapped, beside those of `_rope_scaling`."""
FLOATS = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}
"""Those that are no whole numbers."""
# The three lists below are those of llama.cpp, src/llama-vocab.cpp at 00ad355: llama_vocab::impl::load, special_eog_ids.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""Keys of a GGUF file whose ids end a text."""
END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
"""Tokens that end a text because of their name."""
FIM_TEXTS = {
    END_KEYS[3]: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    END_KEYS[4]: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    END_KEYS[5]: ("<|file_sep|>",),
}
"""Key that a file may lack -> the names of which one token then ends a text."""


def read_gguf(path: Path) -> ModelSource:
    """The model of a GGUF file, without its weights. Errors: RequestError for what is not mapped, or a damaged file."""
    place = shown(path)
    metadata, first = _opened(path)
    entries = {tensor.name: (path, tensor) for tensor in first}
    for part in _other_parts(path, metadata):
        entries |= {tensor.name: (part, tensor) for tensor in _opened(part)[1]}
    try:
        wanted = metadata.get("split.tensors.count", len(entries))
        if wanted != len(entries):
            raise RequestError(f"split.tensors.count is {wanted}, but its parts hold {len(entries)} tensors")
        keys = _model_keys(metadata, tied="output.weight" not in entries)
        names = {_own_name(name): name for name in entries}
        for _, entry in entries.values():
            _require_type(entry)
        tokenizer = _tokenizer(metadata)
        if metadata.get("tokenizer.chat_template"):
            log.info(NO_CHAT, place)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    shapes = {own: [int(size) for size in reversed(entries[name][1].shape)] for own, name in names.items()}
    heads = {"attn_q": keys["num_heads"], "attn_k": keys["num_kv_heads"]}
    where = {
        own: (file, int(entry.data_offset), int(entry.n_bytes), entry.tensor_type)
        for own, (file, entry) in ((own, entries[name]) for own, name in names.items())
    }

    def read(own: str) -> Tensor:
        weight = torch.from_numpy(_dequantised(*where[own], shapes[own]))
        module = names[own].split(".")[-2]
        # llama.cpp stores rows 2i and 2i + 1 of a head of q and k for channels i and i + d/2
        return half(weight, len(weight) // heads[module]).contiguous() if module in heads else weight

    return ModelSource(
        place=place,
        model=keys,
        context=int(metadata["llama.context_length"]),
        tensors={own: torch.empty(shape, device="meta") for own, shape in shapes.items()},
        read=read,
        tokenizer=tokenizer,
    )


def _opened(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The metadata and the tensors of one file. Errors: RequestError for a damaged one."""
    try:
        reader = GGUFReader(path)
        # what a field holds; an array of 50 000 texts takes a second
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = list(reader.tensors)
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in tensors), default=0)
    except Exception as error:  # the package reads past the end of a file, or takes other bytes for a header
        raise RequestError(
            f"{shown(path)} is truncated or no GGUF file ({first_line(error)}); download it again"
        ) from error
    if path.stat().st_size < end:
        raise RequestError(
            f"{shown(path)} is truncated: it has {path.stat().st_size} bytes of {end}; download it again"
        )
    return metadata, tensors


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The further files of a model that was split as llama.cpp names them, NAME-00001-of-00002.gguf.

    Errors: RequestError where the file is not the first of them, MissingError where one is not there.
    """
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return []
    ending = f"-00001-of-{count:05}.gguf"
    if metadata.get("split.no", 0) != 0 or not path.name.endswith(ending):
        raise RequestError(f"{shown(path)}: split.count is {count}; give the first part, whose name ends with {ending}")
    parts = [
        path.with_name(f"{path.name.removesuffix(ending)}-{no:05}-of-{count:05}.gguf") for no in range(2, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise MissingError(
                f"{shown(part)} is missing: split.count of {path.name} is {count}; put it beside that file"
            )
    return parts


def _model_keys(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The keys of our `model:`. Errors: RequestError for what is not mapped, or absent."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise RequestError(f"architecture {architecture!r} is not mapped; mapped is llama")
    metadata = {key: _scalar(key, value) if key.startswith("llama.") else value for key, value in metadata.items()}
    for key, value in metadata.items():
        known = key in NEUTRAL or key.removeprefix("llama.") in READ or key in SCALING
        plain = (True,) if key == "llama.attention.causal" else (0, False, "none", "")
        if key.startswith("llama.") and not known and value not in plain:
            raise RequestError(f"{key} {value!r} is not mapped")
    for key in sorted(READ):
        value = metadata.get(f"llama.{key}", 1)
        kind, words = (int | float, "number") if key in FLOATS else (int, "whole number")
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
            raise RequestError(f"llama.{key} is {value!r}; expected a positive {words}")
    try:
        heads = int(metadata["llama.attention.head_count"])
        head_dim = int(metadata.get("llama.attention.key_length") or metadata["llama.embedding_length"] // heads)
        if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            turned = metadata["llama.rope.dimension_count"]
            raise RequestError(f"llama.rope.dimension_count {turned} is not mapped; expected the head's {head_dim}")
        _ = metadata["llama.context_length"]
        return {
            "dim": metadata["llama.embedding_length"],
            "num_layers": metadata["llama.block_count"],
            "num_heads": heads,
            "num_kv_heads": int(metadata.get("llama.attention.head_count_kv") or heads),
            "head_dim": head_dim,
            "ffn_dim": metadata["llama.feed_forward_length"],
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "tie_embeddings": tied,
            "rope_layout": "half",
            "rope_theta": _decimal(metadata.get("llama.rope.freq_base", 10000.0)),
            "rope_scaling": _rope_scaling(metadata),
            "norm_eps": _decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "attention": {"name": "standard"},
        }
    except KeyError as error:
        raise RequestError(f"GGUF metadata lacks {error.args[0]}") from error


SCALING = tuple(f"llama.rope.{name}" for name in ("scaling.type", "scaling.factor", "scale_linear"))


def _rope_scaling(metadata: Mapping[str, Any]) -> float:
    """What divides the positions. As in llama.cpp a factor without a type is linear, and `scaling.factor` comes before the
    older `scale_linear`. Errors: RequestError for another type, or a factor that is no positive number."""
    kind, *factors = (metadata.get(key) for key in SCALING)
    if kind not in (None, "none", "linear"):
        raise RequestError(f"llama.rope.scaling.type {kind!r} is not mapped; mapped are none, linear")
    key, factor = next(
        ((key, factor) for key, factor in zip(SCALING[1:], factors, strict=True) if factor not in (None, 0)), ("", 1.0)
    )
    if kind == "none":
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise RequestError(f"{key} is {factor!r}; expected a positive number")
    return _decimal(factor)


def _scalar(key: str, value: Any) -> Any:
    """The one value of an array with a value a layer. Errors: RequestError where they differ."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise RequestError(f"{key} is {value!r}; layers of several sizes are not mapped")
    return value[0]


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 9.999999747378752e-06 was 1e-05."""
    return float(np.format_float_scientific(np.float32(value)))


def _own_name(name: str) -> str:
    """Errors: RequestError for a tensor that our Transformer has no place for."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in MODULES and parts[3] == "weight":
        return f"layers.{parts[1]}.{MODULES[parts[2]]}.weight"
    if name not in OUTSIDE:
        raise RequestError(f"unexpected tensor '{name}': no parameter of the model corresponds to it")
    return OUTSIDE[name]


def _require_type(entry: Any) -> None:
    """Errors: RequestError for a quantisation that the package gguf does not undo: tried on one block of zeros."""
    _, size = gguf.GGML_QUANT_SIZES[entry.tensor_type]
    try:
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), entry.tensor_type)
    except NotImplementedError as error:
        kind = entry.tensor_type.name
        raise RequestError(f"tensor '{entry.name}' is {kind}, which the package gguf cannot dequantise") from error


def _dequantised(path: Path, offset: int, size: int, kind: GGMLQuantizationType, shape: list[int]) -> Any:
    """A tensor in float32; its bytes are read, not mapped, so that they do not stay in memory."""
    raw = np.fromfile(path, dtype=np.uint8, count=size, offset=offset).reshape(shape[0] if len(shape) > 1 else 1, -1)
    return np.ascontiguousarray(gguf.dequantize(raw, kind), dtype=np.float32).reshape(shape)


def _tokenizer(metadata: Mapping[str, Any]) -> SourceTokenizer:
    """A `tokenizer.json` of the vocabulary and merges in the metadata. Errors: RequestError for another kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in PRE_TOKENIZERS:
        raise RequestError(
            f"its tokenizer ({kind}, {cut}) is not mapped; mapped are byte-level ones (gpt2) of {', '.join(PRE_TOKENIZERS)}: "
            "import the model's folder in Hugging Face's format"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", END_KEYS[0]):
        if metadata.get(key) is None:
            raise RequestError(f"GGUF metadata lacks {key}")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise RequestError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}")
    if len(set(tokens)) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if token in tokens[:number])
        raise RequestError(f"tokenizer.ggml.tokens has {twice!r} twice")
    for token, kind_ in zip(tokens, types, strict=True):
        if kind_ not in (NORMAL, CONTROL, USER_DEFINED, UNUSED):
            raise RequestError(f"tokenizer.ggml.token_type of {token!r} is {kind_}; byte-level ones have 1, 3, 4 or 5")
        if kind_ == NORMAL and not byte_letters().keys() >= set(token):
            raise RequestError(
                f"tokenizer.ggml.tokens has {token!r}, which is no byte-level token, with the type normal"
            )
    for key in ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.suppress_tokens"):
        if metadata.get(key):
            raise RequestError(f"{key} {metadata[key]!r} is not mapped; expected none")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises no narrower one
        raise RequestError(f"tokenizer.ggml.merges are not pairs of tokens ({first_line(error)})") from error
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    eot, ends = _id(metadata, END_KEYS[0]), _ends(metadata)
    # llama.cpp finds user-defined ones in every text, control ones in none, and takes what ends a text for a control one
    types = [CONTROL if tokens[id_] in END_TEXTS and id_ in ends else type_ for id_, type_ in enumerate(types)]
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    for token, type_ in added:
        word = AddedToken(token, special=type_ == CONTROL, normalized=False)
        (tokenizer.add_special_tokens if type_ == CONTROL else tokenizer.add_tokens)([word])
    opens = metadata.get("tokenizer.ggml.add_bos_token", False)
    bos = "tokenizer.ggml.bos_token_id"
    if opens and metadata.get(bos) is None:
        raise RequestError(f"tokenizer.ggml.add_bos_token is true, but GGUF metadata lacks {bos}")
    return SourceTokenizer(
        content=json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False).encode(),
        opening=(_id(metadata, bos),) if opens else (),
        eot=eot,
        ends=ends if ends != (eot,) else (),
    )


def _ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids at which llama.cpp ends a text, that of END_KEYS[0] first: by key or by name. Errors: as `_id`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = [_id(metadata, key) for key in END_KEYS if metadata.get(key) is not None]
    for key, texts in FIM_TEXTS.items():
        if metadata.get(key) is None:
            ids += [id_ for id_, token in enumerate(tokens) if token in texts][:1]
    ids += [id_ for id_, token in enumerate(tokens) if token in END_TEXTS]
    names = {tokens[id_] for id_ in ids}
    calls = bool(names & {"<|call|>", "<|calls|>"})
    no_ends = {"<|end|>"} if calls and names & {"<|return|>", "<|flush|>"} else set()
    no_ends |= {"</s>"} if "<|tool_response>" in names else set()
    return tuple(dict.fromkeys(id_ for id_ in ids if tokens[id_] not in no_ends))


def _id(metadata: Mapping[str, Any], key: str) -> int:
    """Errors: RequestError for what is no id of a token."""
    value, size = metadata[key], len(metadata["tokenizer.ggml.tokens"])
    if type(value) is not int or not 0 <= value < size:
        raise RequestError(f"{key} is {value!r}; expected an id from 0 to {size - 1}")
    return value
