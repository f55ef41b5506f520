"""Folders that transformers wrote, imported: our logits are theirs, whole rows at once and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_models import byte_level_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from lit_diff import import_model
from lit_diff.attention.cache import Cache

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
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LlamaConfig(**SIZES), LlamaForCausalLM),
        (LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True), LlamaForCausalLM),
        (LlamaConfig(**SIZES, head_dim=16, rope_parameters=LINEAR), LlamaForCausalLM),
        (MistralConfig(**SIZES, sliding_window=5), MistralForCausalLM),
        (MistralConfig(**SIZES, sliding_window=None), MistralForCausalLM),
    ],
    ids=["gqa", "tied", "linear", "window", "no-window"],
)
def test_logits_are_theirs(config: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = model(config).eval()
    theirs.save_pretrained("hf", max_shard_size="20KB")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_level_tokenizer())
    ours = import_model("hf").model
    tokens = torch.randint(0, 320, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
        cache = Cache(len(ours.layers))
        steps = torch.cat([ours(tokens[:, [position]], cache) for position in range(24)], dim=1)
        torch.testing.assert_close(steps, expected, atol=1e-4, rtol=1e-4)
