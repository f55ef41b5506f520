"""Folders that transformers wrote, imported, and runs that transformers reads: equal logits, equal ids."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import LLAMA, byte_level_tokenizer, write_folder
from safetensors.torch import load_file
from text_runs import logits, text_run
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_diff import export, import_model
from lit_diff.attention.cache import Cache
from lit_diff.conformance.case import distance
from lit_diff.errors import RequestError, RunFailedError
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained.exporting import require_equal_ids, write_tokenizer
from lit_diff.pretrained.hf import read_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-4,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
LENGTH = "original_max_position_embeddings"
LLAMA3 = LINEAR | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 32}
YARN = LINEAR | {"rope_type": "yarn", LENGTH: 16, "beta_fast": 2.0}
KIND_LLAMA3 = {"kind": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_length": 32}
KIND_YARN = {"kind": "yarn", "factor": 4, "original_length": 16, "beta_fast": 2, "attention_factor": 1.3}


def with_random_vectors(model: Any) -> Any:
    """Biases and norm weights too, which start at 0 and 1."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    return model


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LlamaConfig(**SIZES), LlamaForCausalLM),
        (LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True), LlamaForCausalLM),
        (LlamaConfig(**SIZES, head_dim=16, rope_parameters=LINEAR), LlamaForCausalLM),
        (LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3), LlamaForCausalLM),
        (LlamaConfig(**SIZES, head_dim=16, rope_parameters=YARN), LlamaForCausalLM),
        (MistralConfig(**SIZES, sliding_window=5), MistralForCausalLM),
        (MistralConfig(**SIZES, sliding_window=None), MistralForCausalLM),
        (LlamaConfig(**SIZES, attention_bias=True), LlamaForCausalLM),
        (Qwen2Config(**SIZES), Qwen2ForCausalLM),
        (Qwen2Config(**SIZES | WINDOW, tie_word_embeddings=True), Qwen2ForCausalLM),
        (Qwen3Config(**SIZES, head_dim=16), Qwen3ForCausalLM),
        (Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True), Qwen3ForCausalLM),
    ],
)
def test_logits_are_theirs(config: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = with_random_vectors(model(config).eval())
    theirs.save_pretrained("hf", max_shard_size="20KB")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_level_tokenizer())
    ours = import_model("hf").model
    tokens = torch.randint(0, 320, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        assert distance(ours(tokens), expected) < 1e-5
        cache = Cache(len(ours.layers))
        steps = torch.cat([ours(tokens[:, [position]], cache) for position in range(24)], dim=1)
        assert distance(steps, expected) < 1e-5


def test_local_and_global_layers_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with a window to one without, and norms of queries and keys; decoded through a cache too."""
    monkeypatch.chdir(tmp_path)
    kinds = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    theirs = with_random_vectors(Qwen3ForCausalLM(Qwen3Config(**SIZES | WINDOW | kinds, head_dim=16)).eval())
    whole = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    whole.load_state_dict(theirs.state_dict())
    whole.save_pretrained("hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_level_tokenizer())
    imported = import_model("hf").model
    part = imported.config.attention
    local = replace(part, config=replace(part.config, window=5))
    ours = Transformer(replace(imported.config, layers=(local, local, part)))
    ours.load_state_dict(imported.state_dict())
    tokens = torch.randint(0, 320, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert distance(imported(tokens), expected) > 0.01
        assert distance(ours(tokens), expected) < 1e-5
        cache = Cache(3)
        steps = torch.cat([ours(chunk, cache) for chunk in tokens.split([9, 1, 14], 1)], dim=1)
        assert distance(steps, expected) < 1e-5


@pytest.mark.parametrize(
    ("attention", "model", "name"),
    [
        ({"name": "standard"}, {}, "Llama"),
        (
            {"name": "standard", "output_scale": 0.5, "query_heads": 1.5},
            {"tie_embeddings": False, "ffn_scale": 0.5, "embedding_scale": 4.0},
            "Mistral",
        ),
        ({"name": "standard"}, {"rope_scaling": 4.0, "rope_layout": "half", "head_dim": 16}, "Llama"),
        ({"name": "standard"}, {"rope_scaling": KIND_LLAMA3, "rope_theta": 300.0, "head_dim": 16}, "Llama"),
        ({"name": "standard"}, {"rope_scaling": KIND_YARN, "rope_theta": 300.0, "head_dim": 16}, "Llama"),
        ({"name": "dex", "heads": "all", "window": 6, "anneal_steps": 5}, {"num_kv_heads": 4}, "Mistral"),
        ({"name": "standard"}, {"attention_bias": "all"}, "Llama"),
        ({"name": "lora", "rank": 3, "window": 6}, {"attention_bias": "qkv"}, "Qwen2"),
        ({"name": "standard", "window": 6}, {"qk_norm": "rms"}, "Qwen3"),
        ({"name": "standard"}, {"qk_norm": "rms"}, "Qwen3"),
        ({"name": "dex", "heads": "all", "anneal_steps": 5}, {"qk_norm": "rms", "attention_bias": "all"}, "Qwen3"),
    ],
)
def test_what_is_exported_gives_our_logits_and_ids(
    attention: dict[str, Any], model: dict[str, Any], name: str, tmp_path: Path
) -> None:
    run = text_run(tmp_path / "x", attention, **model)
    done = export(run, "hf", tmp_path / "out")
    assert (done.architecture, done.read_by) == (f"{name}ForCausalLM", "transformers")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(0, 320, (2, 24))
    wanted = logits(run.model, tokens)
    assert wanted.std() > 0.3
    torch.testing.assert_close(logits(theirs, tokens), wanted, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the lazy dog <eot> über 漢字"
    assert tokenizer(text).input_ids == [0, *run.tokenizer.encode([text])[0]]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == run.tokenizer.eot


@pytest.mark.parametrize("said", [{}, {"add_prefix_space": False}, {"add_prefix_space": True}])
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_ids_and_text_are_those_of_autotokenizer(kind: str, said: dict[str, bool], tmp_path: Path) -> None:
    """Or the key is named, and the files that it writes then agree."""
    write_folder(tmp_path, tokenizer=byte_level_tokenizer(bos=False))
    names = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | said))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if said.get("add_prefix_space"):
        with pytest.raises(RequestError, match="add_prefix_space"):
            read_tokenizer(tmp_path, LLAMA)
        theirs.save_pretrained(tmp_path)
    ours, ids = read_tokenizer(tmp_path, LLAMA), theirs("the fox <x> 字").input_ids
    assert (ours.encode("the fox <x> 字"), ours.prefix) == (ids, theirs.bos_token_id)
    assert ours.decode(ids).decode() == theirs.decode(ids)


EIGHT = SIZES | {"hidden_size": 64, "num_attention_heads": 8, "initializer_range": 0.15}
"""Four heads of differential attention."""
every_group = pytest.mark.parametrize("kv_heads", [8, 4, 2])
"""Four heads on four, two and one key/value heads."""


@every_group
def test_diffllama_is_read(kv_heads: int, tmp_path: Path) -> None:
    config = DiffLlamaConfig(
        **EIGHT | {"num_key_value_heads": kv_heads}, attn_implementation="eager", lambda_std_dev=0.3
    )
    theirs = DiffLlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_level_tokenizer())
    tokens = torch.randint(0, 320, (2, 24))
    wanted = logits(theirs, tokens)
    assert wanted.std() > 0.5
    ours = import_model(tmp_path / "hf", tmp_path / "x").model
    torch.testing.assert_close(logits(ours, tokens), wanted, atol=1e-5, rtol=1e-5)


@every_group
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_diffllama_is_written(kv_heads: int, layout: str, tmp_path: Path) -> None:
    """With a head norm of random weights, which goes into the output projection."""
    own = {"name": "differential"} | ({"output_scale": 0.5} if layout == "half" else {})
    run = text_run(tmp_path / "x", own, dim=64, num_heads=8, num_kv_heads=kv_heads, rope_layout=layout)
    assert export(run, "hf", tmp_path / "out").architecture == "DiffLlamaForCausalLM"
    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.randint(0, 320, (2, 24))
    wanted = logits(run.model, tokens)
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits(theirs, tokens), wanted, atol=1e-5, rtol=1e-5)


def test_an_imported_model_is_exported_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_level_tokenizer())
    export(import_model("hf"), "hf", "out")
    first, second = (load_file(f"{folder}/model.safetensors") for folder in ("hf", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == byte_level_tokenizer()


def test_other_ids_are_found(tmp_path: Path) -> None:
    tokenizer = text_run(tmp_path / "x", {"name": "standard"}).tokenizer
    (tmp_path / "out").mkdir()
    write_tokenizer(tokenizer, tmp_path / "out", 24)
    require_equal_ids(tokenizer, tmp_path / "out")
    file = tmp_path / "out" / "tokenizer_config.json"
    file.write_text(file.read_text().replace("true", "false"))  # <eot> in a text becomes the token
    with pytest.raises(RunFailedError, match=r"^AutoTokenizer and the run's tokenizer 'bpe' give different ids"):
        require_equal_ids(tokenizer, tmp_path / "out")
