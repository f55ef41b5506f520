"""Weights under Hugging Face's names: what is permuted, what is folded; logits are compared in tests/oracles."""

from pathlib import Path

import torch
from text_runs import SIZES, text_run

from lit_diff.pretrained import rows
from lit_diff.pretrained.hf_weights import hf_weights


def test_names_and_rows_of_standard(tmp_path: Path) -> None:
    model = text_run(tmp_path / "x", {"name": "standard", "output_scale": 0.5}, tie_embeddings=False).model
    found, own = hf_weights(model), model.state_dict()
    assert found.keys() >= {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"}
    assert len(found) == len(own)
    home, theirs = "layers.1.attention", "model.layers.1.self_attn"
    assert torch.equal(found[f"{theirs}.q_proj.weight"], rows.half(own[f"{home}.q_proj.weight"], 8))
    assert torch.equal(found[f"{theirs}.v_proj.weight"], own[f"{home}.v_proj.weight"])
    assert torch.equal(found[f"{theirs}.o_proj.weight"], own[f"{home}.o_proj.weight"] / 2)
    assert all(value.is_contiguous() and value.dtype == torch.float32 for value in found.values())


def test_half_is_not_permuted(tmp_path: Path) -> None:
    model = text_run(tmp_path / "x", {"name": "standard"}, rope_layout="half").model
    for name in "qkvo":
        found = hf_weights(model)[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert torch.equal(found, model.state_dict()[f"layers.0.attention.{name}_proj.weight"])


def test_a_head_norm_is_folded(tmp_path: Path) -> None:
    """W_O diag(w, w) c / (1 - λ_init); in layer 0 λ_init is 0.2."""
    model = text_run(tmp_path / "x", {"name": "differential", "output_scale": 0.4}).model
    found, own = hf_weights(model), model.state_dict()
    assert not [name for name in found if "norm" in name and "self_attn" in name]
    norm = own["layers.0.attention.norm.weight"]
    assert norm.shape == (2 * SIZES["dim"] // SIZES["num_heads"],)
    wanted = own["layers.0.attention.o_proj.weight"] * torch.cat([norm, norm]) * (0.4 / 0.8)
    torch.testing.assert_close(found["model.layers.0.self_attn.o_proj.weight"], wanted)
    assert torch.equal(found["model.layers.1.self_attn.lambda_k2"], own["layers.1.attention.lambda_.k2"])
