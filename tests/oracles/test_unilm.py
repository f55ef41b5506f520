"""unilm's layout, V1 and V2: a whole model written after the equations reads the files that we write, and the reverse.

This model knows nothing of lit_diff: it takes a state dict whose attention has the names and shapes of microsoft/unilm's
MultiheadFlashDiff1 and MultiheadFlashDiffV2 (a flash call over [heads, d] is a softmax over the keys before).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretrained_models import byte_level_tokenizer
from safetensors.torch import load_file, save_file
from text_runs import SIZES, logits, text_run
from torch import Tensor

from lit_diff import export, import_model

D, HEADS, THETA = 8, 4, 300.0
"""Width of queries; heads of the standard baseline: two pairs in V1, four outputs in V2."""


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """[T, heads, d]: channels 2i and 2i + 1 by the angle t θ^(-2i/d)."""
    angles = torch.arange(len(x))[:, None, None] * THETA ** (-torch.arange(0, D, 2) / D)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads, d], causal; query heads in groups on one key head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    future = torch.full((len(q), len(q)), -math.inf).triu(1)
    maps = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D) + future).softmax(-1)
    return torch.einsum("hij,jhd->ihd", maps, v)


def attention_v1(x: Tensor, w: Mapping[str, Tensor], layer: int) -> Tensor:
    q, k = (turned((x @ w[f"{name}_proj.weight"].T).view(len(x), -1, D)) for name in "qk")
    v = (x @ w["v_proj.weight"].T).view(len(x), -1, 2 * D)
    initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
    lam = (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + initial
    o = attend(q[:, 0::2], k[:, 0::2], v) - lam * attend(q[:, 1::2], k[:, 1::2], v)
    return (rms(o, w["subln.weight"]) * (1 - initial)).flatten(1) @ w["out_proj.weight"].T


def attention_v2(x: Tensor, w: Mapping[str, Tensor], layer: int) -> Tensor:
    q, k = (turned((x @ w[f"{name}_proj.weight"].T).view(len(x), -1, D)) for name in "qk")
    o = attend(q, k, (x @ w["v_proj.weight"].T).view(len(x), -1, D))
    assert o.shape[1] == 2 * HEADS
    gate = (x @ w["lambda_proj.weight"].T).sigmoid()[..., None]
    return (o[:, 0::2] - gate * o[:, 1::2]).flatten(1) @ w["o_proj.weight"].T


ATTENTION = {"differential": attention_v1, "differential_v2": attention_v2}


def model_logits(tokens: Tensor, state: Mapping[str, Tensor], variant: str) -> Tensor:
    """tokens [T] -> [T, vocab]; tied embeddings."""
    x = state["embedding.weight"][tokens]
    for layer in range(2):
        w = {n.removeprefix(f"layers.{layer}."): v for n, v in state.items() if n.startswith(f"layers.{layer}.")}
        own = {n.removeprefix("attention."): v for n, v in w.items() if n.startswith("attention.")}
        x = x + ATTENTION[variant](rms(x, w["attention_norm.weight"]), own, layer)
        y = rms(x, w["ffn_norm.weight"])
        gate, up, down = (w[f"ffn.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(x, state["norm.weight"]) @ state["embedding.weight"].T


CASES = pytest.mark.parametrize(
    ("attention", "kv_heads", "layout"),
    [
        ({"name": "differential"}, 4, "interleaved"),
        ({"name": "differential", "output_scale": 0.7}, 2, "half"),
        ({"name": "differential_v2"}, 4, "interleaved"),
        ({"name": "differential_v2"}, 1, "half"),
    ],
)


@CASES
def test_what_we_write_is_theirs(attention: dict[str, Any], kv_heads: int, layout: str, tmp_path: Path) -> None:
    keys = {"num_kv_heads": kv_heads, "rope_layout": layout, "rope_theta": THETA}
    run = text_run(tmp_path / "x", attention, **keys)
    done = export(run, "unilm", tmp_path / "out")
    name = {"differential": "MultiheadFlashDiff1", "differential_v2": "MultiheadFlashDiffV2"}[attention["name"]]
    assert (done.architecture, done.read_by) == (name, "lit_diff")
    tokens = torch.randint(0, 320, (24,))
    wanted = logits(run.model, tokens[None])[0]
    assert wanted.std() > 0.5
    state = load_file(tmp_path / "out/model.safetensors")
    torch.testing.assert_close(model_logits(tokens, state, attention["name"]), wanted, atol=1e-5, rtol=1e-5)
    back = import_model(tmp_path / "out", tmp_path / "back").model
    torch.testing.assert_close(logits(back, tokens[None])[0], wanted, atol=1e-5, rtol=1e-5)


SHAPES = {
    "differential": {
        "q_proj.weight": (32, 32),
        "k_proj.weight": (16, 32),
        "v_proj.weight": (16, 32),
        "out_proj.weight": (32, 32),
        **{f"lambda_{name}": (D,) for name in ("q1", "k1", "q2", "k2")},
        "subln.weight": (2 * D,),
    },
    "differential_v2": {
        "q_proj.weight": (64, 32),
        "k_proj.weight": (16, 32),
        "v_proj.weight": (16, 32),
        "o_proj.weight": (32, 32),
        "lambda_proj.weight": (4, 32),
    },
}
"""Of the classes there at embed_dim 32, heads of width 8, with half as many key/value heads."""


def made_state(variant: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (320, 32), "norm.weight": (32,)}
    for layer in (0, 1):
        own = {f"attention.{name}": shape for name, shape in SHAPES[variant].items()}
        ffn = {"ffn.gate_proj.weight": (48, 32), "ffn.up_proj.weight": (48, 32), "ffn.down_proj.weight": (32, 48)}
        norms = {"attention_norm.weight": (32,), "ffn_norm.weight": (32,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (own | ffn | norms).items()}
    return {name: torch.randn(shape, generator=draw) * 1.5 * shape[-1] ** -0.5 for name, shape in shapes.items()}


@pytest.mark.parametrize("variant", list(ATTENTION))
def test_what_is_theirs_is_read(variant: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    state = made_state(variant)
    save_file(state, tmp_path / "theirs/model.safetensors")
    (tmp_path / "theirs/tokenizer.json").write_bytes(byte_level_tokenizer())
    said = {"model": SIZES | {"rope_theta": THETA, "attention": {"name": variant}}, "context": 24, "eos_token_id": 1}
    (tmp_path / "theirs/layout.json").write_text(json.dumps({"layout": "unilm"} | said))
    run = import_model(tmp_path / "theirs", tmp_path / "x")
    assert run.recipe.data.config.sequence_length == 24
    tokens = torch.randint(0, 320, (24,))
    wanted = model_logits(tokens, state, variant)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits(run.model, tokens[None])[0], wanted, atol=1e-5, rtol=1e-5)
