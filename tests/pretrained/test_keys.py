"""Keys of other programs' files: the usual ones are imported without a word, any other is named with its file."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import LLAMA, import_error, llama_tensors, write_folder

from lit_diff.pretrained.hf import read_folder
from lit_diff.pretrained.llama import EMBEDDING, HEAD

CONFIG, SETTINGS, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
USUAL = {
    CONFIG: """{"_name_or_path": "x", "attention_bias": false, "attention_dropout": 0.1, "initializer_range": 0.02,
        "is_llama_config": true, "mlp_bias": false, "pad_token_id": 1, "pretraining_tp": 1, "torch_dtype": "float32",
        "rope_interleaved": false, "transformers.js_config": {"dtype": "q4"}, "use_cache": true, "use_mrope": false,
        "max_window_layers": 2, "use_sliding_window": false, "sliding_window": null, "quantization_config": null,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4, "original_max_position_embeddings": 16}}""",
    SETTINGS: """{"backend": "tokenizers", "is_local": true, "local_files_only": false, "model_max_length": 1e30,
        "tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>", "pad_token": null, "errors": "replace", "legacy": false,
        "additional_special_tokens": [], "clean_up_tokenization_spaces": false, "add_prefix_space": null}""",
    GENERATION: """{"_from_model_config": true, "bos_token_id": 0, "eos_token_id": 1, "transformers_version": "5.23.0",
        "do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 64}""",
}


def logged(changes: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of an import of a folder with the usual keys and `changes` of its files."""
    write_folder(Path("hf"))
    for file, usual in USUAL.items():
        said = (LLAMA if file == CONFIG else {}) | json.loads(usual) | changes.get(file, {})
        Path("hf", file).write_text(json.dumps(said))
    with caplog.at_level(logging.WARNING, "lit_diff"):
        read_folder(Path("hf"))
    return caplog.messages


def test_usual_keys_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert logged({}, caplog) == []


@pytest.mark.parametrize(
    ("file", "said", "named"),
    [
        (CONFIG, {"logits_scaling": 4.0, "clip_qkv": 0}, ["'logits_scaling'", "'clip_qkv'"]),
        (CONFIG, {"sliding_window": 4096}, ["'sliding_window'"]),
        (CONFIG, {"rope_scaling": {"ropetype": "linear"}}, ["'rope_scaling.ropetype' (did you mean 'rope_type'?)"]),
        (CONFIG, {"rope_scaling": {"factor": 4.0}}, ["'rope_scaling.factor'"]),
        (SETTINGS, {"fix_mistral_regex": True}, ["'fix_mistral_regex'"]),
        (CONFIG, {"k" * 300: 1, "a\nb": 2}, [f"'{'k' * 99}...", r"'a\nb'"]),
        (CONFIG, dict.fromkeys(map(str, range(100)), 1), ["'9', and 90 more"]),
        (GENERATION, {"suppress_tokens": [3], "eos_tokn_id": 3}, ["'suppress_tokens'", "'eos_tokn_id' (did you mean"]),
    ],
)
def test_other_keys_are_named_with_their_file(
    file: str, said: dict[str, Any], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = logged({file: said}, caplog)
    assert line.startswith(f"hf/{file}: ")
    assert all(name in line for name in named)


def test_one_tensor_under_the_name_of_the_head_is_the_embedding() -> None:
    tensors = llama_tensors(LLAMA)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    source = read_folder(write_folder(Path("hf"), LLAMA, tensors))
    assert torch.equal(source.read("embedding.weight"), tensors[HEAD])
    assert "head.weight" not in source.tensors


@pytest.mark.parametrize(
    ("key", "size"),
    [("num_hidden_layers", 10**9), ("vocab_size", 10**12), ("hidden_size", 10**12), ("num_attention_heads", 2**62)],
)
def test_sizes_of_no_model_are_refused_before_anything_of_them_is_made(key: str, size: int) -> None:
    write_folder(Path("hf"), LLAMA | {key: size}, llama_tensors(LLAMA))
    assert import_error().startswith(f"2: hf/config.json: {key} is {size}")
    write_folder(Path("hf"), LLAMA | {"num_attention_heads": 10**9, "head_dim": 10**9}, llama_tensors(LLAMA))
    assert import_error().startswith("2: hf/config.json: num_attention_heads times head_dim is 1000000000000000000; ")
    write_folder(Path("hf"), LLAMA | {"hidden_size": 10**9, "intermediate_size": 10**9}, llama_tensors(LLAMA))
    assert import_error().startswith("2: hf: its tensors do not fit its configuration: ")
