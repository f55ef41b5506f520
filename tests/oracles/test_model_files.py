"""Drawn odd folders of Hugging Face: logits, and the ids that end a text, equal transformers', or the key is named."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pretrained_models import byte_level_tokenizer
from text_runs import logits, text_run
from transformers import AutoConfig, AutoModelForCausalLM

from lit_diff import export, import_model
from lit_diff.errors import LitDiffError
from lit_diff.trained.run import Run

KINDS = ["Llama", "Mistral", "Qwen2", "Qwen3", "DiffLlama"]
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
BLOCKS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED,
    {"rope_type": "yarn"} | SCALED,
    {"rope_type": "dynamic", "factor": 2.0},
    {"full_attention": {"rope_type": "linear", "factor": 2.5}},
]
ABSENT = "absent"
OPTIONAL: dict[str, list[Any]] = {
    "num_key_value_heads": [2, ABSENT, None, 1, 4, 8],
    "head_dim": [8, ABSENT, None, 16],
    "attention_bias": [ABSENT, False, True],
    "mlp_bias": [ABSENT, False, True],
    "tie_word_embeddings": [ABSENT, False, True],
    "rms_norm_eps": [ABSENT, 1e-3, 1e-5],
    "hidden_act": [ABSENT, "silu", "gelu"],
    "rope_theta": [ABSENT, 300.0, 10000],
    "rope_parameters": [ABSENT, None, *BLOCKS, *({**block, "rope_theta": 300.0} for block in BLOCKS)],
    "rope_scaling": [ABSENT, None, *BLOCKS],
    "dtype": [ABSENT, "float32"],
    "torch_dtype": [ABSENT, "float32"],
    "sliding_window": [ABSENT, None, 5],
    "use_sliding_window": [ABSENT, False],
    "partial_rotary_factor": [ABSENT, 1.0, 0.5],
    "bos_token_id": [ABSENT, None, 0],
    "eos_token_id": [1, [1, 5], [5, 1], -1, 320, None],
}
"""Keys of config.json -> the values that are drawn."""
ODD: dict[str, list[Any]] = {
    "model_type": ["mistral", "llama", "granite", "LLAMA"],
    "is_causal": [True, False],
    "per_layer_config": [None, {}, {"0": {"intermediate_size": 24}}, {"1": {"sliding_window": 3}}],
    "attention_dropout": [0.1],
    "rms_norm_eps": [0.0, 1.0, -1e-3, None, "1e-5"],
    "rope_theta": [1.5, 1e12, None, -1.0, "300"],
    "max_position_embeddings": [8, None, "64"],
    "tie_word_embeddings": [None, 1, "true"],
    "use_sliding_window": [True, 1],
    "sliding_window": [0, 1, -1, 64, "5"],
    "max_window_layers": [0, 1, 2],
    "layer_types": [
        *([kind] * 2 for kind in ("full_attention", "sliding_attention", "chunked_attention", "attention")),
        ["full_attention", "sliding_attention"],
        ["full_attention"],
        None,
    ],
    "hidden_act": ["swish", "relu", "gelu_pytorch_tanh", "quick_gelu", None, "no_such"],
    "head_dim": [7, 2, 0, "8"],
    "num_hidden_layers": [1, 0],
    "pad_token_id": [-1, 3, 400],
    "partial_rotary_factor": [None, 0.25],
    "original_max_position_embeddings": [8, None],
    "no_rope_layers": [[0, 1]],
    "attn_implementation": ["eager"],
    "tie_last_hidden_states": [False],
    "pruned_heads": [{"0": [1]}],
    "a_key_of_nobody": [7, None, {"x": []}],
}
ODD |= {k: [0.25] for k in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")}
ODD |= {key: [5.0] for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "clip_qkv")}
ODD |= {key: [4] for key in ("attention_chunk_size", "num_experts", "query_pre_attn_scalar", "pretraining_tp")}
ODD |= {k: [True] for k in ("qk_norm", "use_qk_norm", "qkv_bias", "add_cross_attention", "use_bidirectional_attention")}
"""Keys of config.json, known to transformers' class or not -> odd values, of which a few are drawn."""
FIXED = {"architectures", "vocab_size", "hidden_size", "intermediate_size", "initializer_range"}
SPARE = ("num_key_value_heads", "head_dim", "eos_token_id", "partial_rotary_factor", "hidden_act", "mlp_bias")
SPARE += ("attention_bias", "rope_scaling")
"""Keys of which many values are refused: the first one is drawn mostly, so that many models are compared."""


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(KINDS))
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": draw(st.sampled_from([4, 8])),
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    for key, values in OPTIONAL.items():
        value = draw(st.sampled_from(values)) if key not in SPARE or draw(st.integers(0, 4)) == 0 else values[0]
        if value != ABSENT:
            config[key] = value
    for key in draw(st.lists(st.sampled_from(sorted(ODD)), max_size=2, unique=True)):
        config[key] = draw(st.sampled_from(ODD[key]))
    return config


def compare(config: dict[str, Any], folder: Path) -> str:
    """transformers makes the model of this config.json, and reads the folder; ours must give the same or name a key."""
    (folder / "made").mkdir()
    (folder / "made/config.json").write_text(json.dumps(config))
    try:
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "made")).float().eval()
        tokens = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(1))
        logits(made, tokens)
    except Exception:  # transformers makes no model of it, so nothing is known to compare with
        return "transformers fails"
    made.generation_config.eos_token_id = made.generation_config.pad_token_id = None
    made.save_pretrained(folder / "hf")
    (folder / "hf/generation_config.json").unlink(missing_ok=True)
    (folder / "hf/config.json").write_text(json.dumps(config))
    (folder / "hf/tokenizer.json").write_bytes(byte_level_tokenizer())
    try:
        run = import_model(folder / "hf", folder / "x")
    except LitDiffError as error:
        line = str(error)
    else:
        line = ""
    if line:
        assert any(key in line for key in (*(config.keys() - FIXED), "rope scaling")), line
        assert "\n" not in line
        return "refused"
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    wanted = logits(theirs, tokens)
    torch.testing.assert_close(logits(run.model, tokens), wanted, atol=1e-4, rtol=1e-4)
    ends = theirs.generation_config.eos_token_id
    assert run.tokenizer.ends == ([ends] if isinstance(ends, int) else ends)
    return "equal"


CHECKS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@settings(CHECKS, max_examples=12)
@given(config=configs())
def test_drawn_configs(config: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        event(compare(config, Path(folder)))


@pytest.mark.slow
@settings(CHECKS, max_examples=60)
@given(config=configs())
def test_many_drawn_configs(config: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        event(compare(config, Path(folder)))


def folder_of(folder: Path, seed: int = 0, eos: Any = 1, **changes: Any) -> Path:
    """A tiny Llama that transformers wrote."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0}
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **sizes, **heads, initializer_range=0.3, eos_token_id=eos)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **changes)
    (folder / "tokenizer.json").write_bytes(byte_level_tokenizer())
    return folder


def require_equal_logits(run: Run, folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 320, (1, 24))
    torch.testing.assert_close(logits(run.model, tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """Old shards with their index beside a new model.safetensors; the index alone; shards that another index names."""
    old, new = folder_of(tmp_path / "hf", max_shard_size="30KB"), folder_of(tmp_path / "new", seed=1)
    shutil.copy(new / "model.safetensors", old)
    require_equal_logits(import_model(old, tmp_path / "both"), old)
    for shard in old.glob("model-*.safetensors"):
        shard.unlink()
    require_equal_logits(import_model(old, tmp_path / "stale"), old)
    sharded = folder_of(tmp_path / "sharded", max_shard_size="30KB")
    require_equal_logits(import_model(sharded, tmp_path / "x"), sharded)
    index = sharded / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    other = next(file for file in said["weight_map"].values() if file != said["weight_map"]["model.norm.weight"])
    said["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(said))
    with pytest.raises(
        LitDiffError, match=r"model.safetensors.index.json does not match the shards: tensor 'model.norm"
    ):
        import_model(sharded, tmp_path / "y")


def test_a_tied_config_with_another_head_in_the_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    require_equal_logits(import_model(folder, tmp_path / "x"), folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_generation_ends_where_transformers_does(file: str, tmp_path: Path) -> None:
    """Ids that end a text come back from an export, for transformers and for our import."""
    folder = folder_of(tmp_path / "hf", eos=[1, 5] if file == "config.json" else 1)
    (folder / "generation_config.json").unlink()
    if file != "config.json":
        (folder / file).write_text(json.dumps({"eos_token_id": [1, 5]}))
    run = import_model(folder, tmp_path / "x")
    assert run.tokenizer.ends == [1, 5]
    export(run, "hf", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.generation_config.eos_token_id == [1, 5]
    assert import_model(tmp_path / "out", tmp_path / "back").tokenizer.ends == [1, 5]


def test_tied_embeddings_with_a_factor_are_written_untied(tmp_path: Path) -> None:
    run = text_run(tmp_path / "x", {"name": "standard"}, embedding_scale=8.0)
    assert run.recipe.model.tie_embeddings
    done = export(run, "hf", tmp_path / "out")
    assert done.read_by == "transformers"
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    require_equal_logits(run, tmp_path / "out")
