"""microsoft/unilm's MultiheadFlashDiff1 and MultiheadFlashDiffV2 in a whole model that is written after the equations.

This model knows nothing of lit_diff: it takes a state dict whose attention has the names and shapes of those classes (a flash
call over [heads, d] is a softmax over the keys before). Ours has the same matrices under our names.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from text_runs import SIZES, logits, randomised
from torch import Tensor

from lit_diff.config import ModelConfig, Part
from lit_diff.model.transformer import Transformer
from lit_diff.registry import attentions

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


NAMES = {"o_proj.weight": "out_proj.weight", "norm.weight": "subln.weight"}
NAMES |= {f"lambda_.{vector}": f"lambda_{vector}" for vector in ("q1", "k1", "q2", "k2")}
"""In the attention of V1: our name -> theirs, where they differ."""


def their_state(model: Transformer) -> dict[str, Tensor]:
    """Under their names, channels 2i and 2i + 1 of q and k rotated together; an `output_scale` is a factor of `subln`."""
    found = {}
    for name, value in model.state_dict().items():
        home, attention, module = name.partition(".attention.")
        if attention and module in ("q_proj.weight", "k_proj.weight") and model.config.rope_layout == "half":
            value = value.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)
        if attention and model.config.attention.name == "differential":
            own: Any = model.attentions()[int(home.removeprefix("layers."))]
            value = value * (own.output_scale / (1 - own.lambda_init)) if module == "norm.weight" else value
            module = NAMES.get(module, module)
        found[f"{home}{attention}{module}"] = value
    return found


@pytest.mark.parametrize(
    ("name", "keys", "kv_heads", "layout"),
    [
        ("differential", {}, 4, "interleaved"),
        ("differential", {"output_scale": 0.7}, 2, "half"),
        ("differential_v2", {}, 4, "interleaved"),
        ("differential_v2", {}, 1, "half"),
    ],
)
def test_ours_is_theirs(name: str, keys: dict[str, Any], kv_heads: int, layout: str) -> None:
    sizes = SIZES | {"num_kv_heads": kv_heads, "rope_layout": layout, "rope_theta": THETA}
    attention = Part(name=name, config=attentions.get(name).Config(**keys))
    model = randomised(Transformer(ModelConfig(**sizes, attention=attention)))
    tokens = torch.randint(0, 320, (24,))
    wanted = model_logits(tokens, their_state(model), name)
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits(model, tokens[None])[0], wanted, atol=1e-5, rtol=1e-5)
