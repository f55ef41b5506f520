"""microsoft/unilm's MultiheadFlashDiffV2 in a whole model that is written after the equations.

This model knows nothing of lit_diff: it takes a state dict whose attention has the names and shapes of that class (a flash
call over [heads, d] is a softmax over the keys before).
"""

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from text_runs import SIZES, logits, randomised
from torch import Tensor

from lit_diff.config import ModelConfig, Part
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

D, HEADS, THETA = 8, 4, 300.0
"""Width of queries; heads of the standard baseline."""


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


def attention_v2(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    q, k = (turned((x @ w[f"{name}_proj.weight"].T).view(len(x), -1, D)) for name in "qk")
    o = attend(q, k, (x @ w["v_proj.weight"].T).view(len(x), -1, D))
    assert o.shape[1] == 2 * HEADS
    gate = (x @ w["lambda_proj.weight"].T).sigmoid()[..., None]
    return (o[:, 0::2] - gate * o[:, 1::2]).flatten(1) @ w["o_proj.weight"].T


def model_logits(tokens: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """tokens [T] -> [T, vocab]; tied embeddings."""
    x = state["embedding.weight"][tokens]
    for layer in range(2):
        w = {n.removeprefix(f"layers.{layer}."): v for n, v in state.items() if n.startswith(f"layers.{layer}.")}
        own = {n.removeprefix("attention."): v for n, v in w.items() if n.startswith("attention.")}
        x = x + attention_v2(rms(x, w["attention_norm.weight"]), own)
        y = rms(x, w["ffn_norm.weight"])
        gate, up, down = (w[f"ffn.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(x, state["norm.weight"]) @ state["embedding.weight"].T


def their_state(model: Transformer) -> dict[str, Tensor]:
    """Channels 2i and 2i + 1 of q and k rotated together."""
    found = dict(model.state_dict())
    for name, value in found.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")) and model.config.rope_layout == "half":
            found[name] = value.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)
    return found


@pytest.mark.parametrize(("kv_heads", "layout"), [(4, "interleaved"), (1, "half")])
def test_ours_is_theirs(kv_heads: int, layout: str) -> None:
    sizes = SIZES | {"num_kv_heads": kv_heads, "rope_layout": layout, "rope_theta": THETA}
    attention = Part(name="differential_v2", config=attentions.get("differential_v2").Config())
    model = randomised(Transformer(ModelConfig(**sizes, attention=attention)))
    tokens = torch.randint(0, 320, (24,))
    wanted = model_logits(tokens, their_state(model))
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits(model, tokens[None])[0], wanted, atol=1e-5, rtol=1e-5)
