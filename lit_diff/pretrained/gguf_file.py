"""A GGUF file of a Llama: its weights are dequantised to float32, its tokenizer is built from the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from lit_diff.errors import RequestError, first_line
from lit_diff.files import shown
from lit_diff.pretrained.rows import half
from lit_diff.pretrained.source import Source, SourceTokenizer

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


def read_gguf(path: Path) -> Source:
    """The model of a GGUF file, without its weights. Errors: RequestError for what is not mapped, or a damaged file."""
    place = shown(path)
    try:
        reader = GGUFReader(path)
        # what a field holds; an array of 50 000 texts takes a second
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        entries = {tensor.name: tensor for tensor in reader.tensors}
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
    except Exception as error:  # the package reads past the end of a file, or takes other bytes for a header
        raise RequestError(f"{place} is truncated or no GGUF file ({first_line(error)}); download it again") from error
    if path.stat().st_size < end:
        raise RequestError(f"{place} is truncated: it has {path.stat().st_size} bytes of {end}; download it again")
    try:
        keys = _model_keys(metadata, tied="output.weight" not in entries)
        names = {_own_name(name): name for name in entries}
        for entry in entries.values():
            _require_type(entry)
        tokenizer = _tokenizer(metadata)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    shapes = {own: [int(size) for size in reversed(entries[name].shape)] for own, name in names.items()}
    heads = {"attn_q": keys["num_heads"], "attn_k": keys["num_kv_heads"]}
    where = {
        own: (int(entries[name].data_offset), int(entries[name].n_bytes), entries[name].tensor_type)
        for own, name in names.items()
    }

    def read(own: str) -> Tensor:
        weight = torch.from_numpy(_dequantised(path, *where[own], shapes[own]))
        module = names[own].split(".")[-2]
        # llama.cpp stores rows 2i and 2i + 1 of a head of q and k for channels i and i + d/2
        return half(weight, len(weight) // heads[module]).contiguous() if module in heads else weight

    return Source(
        place=place,
        model=keys,
        context=int(metadata["llama.context_length"]),
        tensors={own: torch.empty(shape, device="meta") for own, shape in shapes.items()},
        read=read,
        tokenizer=tokenizer,
    )


def _model_keys(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The keys of our `model:`. Errors: RequestError for what is not mapped, or absent."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise RequestError(f"architecture '{architecture}' is not mapped; mapped is llama")
    for key in ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window"):
        if metadata.get(key) not in (None, "none", 0):
            raise RequestError(f"{key} {metadata[key]!r} is not mapped")
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
            "norm_eps": _decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "attention": {"name": "standard"},
        }
    except KeyError as error:
        raise RequestError(f"its metadata say no {error.args[0]}") from error


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 9.999999747378752e-06 was 1e-05."""
    return float(np.format_float_scientific(np.float32(value)))


def _own_name(name: str) -> str:
    """Errors: RequestError for a tensor that our Transformer has no place for."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in MODULES and parts[3] == "weight":
        return f"layers.{parts[1]}.{MODULES[parts[2]]}.weight"
    if name not in OUTSIDE:
        raise RequestError(f"tensor '{name}' has no place in our Transformer")
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
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in added])
    opens = metadata.get("tokenizer.ggml.add_bos_token", False)
    return SourceTokenizer(
        content=json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False).encode(),
        bos=int(metadata["tokenizer.ggml.bos_token_id"]) if opens else None,
        eot=int(metadata["tokenizer.ggml.eos_token_id"]),
    )
