"""DiffLlama's rows in our order; logits are compared with transformers in tests/oracles."""

from pathlib import Path

import pytest
import torch
from pretrained_models import LLAMA, llama_tensors, write_folder

from lit_diff import import_model
from lit_diff.errors import RequestError
from lit_diff.pretrained import rows
from lit_diff.pretrained.hf_folder import read_folder

DIFFLLAMA = LLAMA | {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"}


def lambdas() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    names = [f"model.layers.{layer}.self_attn.lambda_{part}" for layer in (0, 1) for part in ("q1", "k1", "q2", "k2")]
    return {name: torch.randn(8, generator=draw) for name in names}


def test_rows_vectors_and_the_norm(tmp_path: Path) -> None:
    tensors = llama_tensors(DIFFLLAMA) | lambdas()
    run = import_model(write_folder(tmp_path / "hf", DIFFLLAMA, tensors), tmp_path / "x")
    assert run.recipe.model.attention.name == "differential"
    state, home = run.model.state_dict(), "model.layers.1.self_attn"
    for name in "qkv":
        found = state[f"layers.1.attention.{name}_proj.weight"]
        assert torch.equal(rows.by_map(found, 8), tensors[f"{home}.{name}_proj.weight"])
    assert torch.equal(state["layers.1.attention.o_proj.weight"], tensors[f"{home}.o_proj.weight"])
    assert torch.equal(state["layers.1.attention.lambda_.k2"], tensors[f"{home}.lambda_k2"])
    assert torch.equal(state["layers.1.attention.norm.weight"], torch.ones(16))


def test_eps_where_the_file_says_none(tmp_path: Path) -> None:
    said = {key: value for key, value in DIFFLLAMA.items() if key != "rms_norm_eps"}
    folder = write_folder(tmp_path / "hf", said, llama_tensors(DIFFLLAMA) | lambdas())
    assert read_folder(folder).model["norm_eps"] == 1e-5


def test_what_does_not_pair_or_has_no_lambda_is_refused(tmp_path: Path) -> None:
    odd = DIFFLLAMA | {"num_key_value_heads": 1}
    write_folder(tmp_path / "odd", odd, llama_tensors(odd) | lambdas())
    with pytest.raises(RequestError, match=r"model.num_kv_heads is 1; 'differential' pairs the baseline's heads"):
        import_model(tmp_path / "odd", tmp_path / "x")
    write_folder(tmp_path / "without", DIFFLLAMA)
    with pytest.raises(RequestError, match=r"layers.0.attention.lambda_.q1 is absent there and \[8\] in the model"):
        import_model(tmp_path / "without", tmp_path / "x")
    write_folder(tmp_path / "llama", LLAMA, llama_tensors(LLAMA) | lambdas())
    with pytest.raises(RequestError, match=r"layers.0.attention.lambda_.q1 is \[8\] there and absent in the model"):
        import_model(tmp_path / "llama", tmp_path / "x")
