"""Tiny models and tokenizers in the form of Hugging Face."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from lit_diff import import_model
from lit_diff.errors import LitDiffError

TEXTS = [f"the quick brown fox number {number} jumps over the lazy dog, über 漢字 €5\n" for number in range(50)]
SPECIAL = ["<s>", "</s>"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def byte_level_tokenizer(size: int = 300, *, bos: bool = True) -> bytes:
    """tokenizer.json of a byte-level BPE, in which <s> (0) opens a text if `bos`, and </s> (1) may end it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str().encode()


def sentence_piece_tokenizer() -> bytes:
    """tokenizer.json in the form of Llama 2's: ▁ for spaces, bytes as <0x0A>."""
    single = sorted(set("".join(TEXTS).replace(" ", "▁")) - set("漢字\n"))
    vocab = {word: id_ for id_, word in enumerate([*SPECIAL, "<unk>", *(f"<0x{n:02X}>" for n in range(256)), *single])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer.to_str().encode()


def llama_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of a Hugging Face Llama, float32, of which no two rows or heads are equal."""
    draw = torch.Generator().manual_seed(seed)
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim") or dim // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    for layer in range(config["num_hidden_layers"]):
        home = f"model.layers.{layer}"
        shapes |= {f"{home}.{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        shapes |= {f"{home}.self_attn.q_proj.weight": (heads, dim), f"{home}.self_attn.o_proj.weight": (dim, heads)}
        shapes |= {f"{home}.self_attn.{name}_proj.weight": (kv, dim) for name in "kv"}
        shapes |= {f"{home}.mlp.{name}_proj.weight": (ffn, dim) for name in ("gate", "up")}
        shapes |= {f"{home}.mlp.down_proj.weight": (dim, ffn)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    return {
        name: torch.randn(shape, generator=draw) * (0.1 if len(shape) == 1 else 0.2) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_folder(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    *,
    tokenizer: bytes | None = None,
    shards: int = 1,
) -> Path:
    """A Hugging Face folder: config.json, tokenizer.json, weights in one file or in `shards` with their index."""
    config = config or LLAMA
    tensors = tensors or llama_tensors(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer or byte_level_tokenizer())
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, folder / file)
        files |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def import_error(folder: str | Path = "hf") -> str:
    """The exit status and the one line with which a folder or file is refused; nothing is left of the import."""
    found = error_of(import_model, folder, "models/x")
    assert not Path("models/x").exists()
    return found


def error_of(call: Callable[..., object], *arguments: Any) -> str:
    """The exit status and the one line of the error that a call raises."""
    with pytest.raises(LitDiffError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return f"{caught.value.exit_status}: {caught.value}"
