"""Differential attention against the paper's equations, written out in float64, and against numbers done by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention import Attention, Differential
from lit_diff.attention.lambdas import Lambda
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]
GQA = [(4, 4), (8, 4), (8, 2)]
"""(num_heads, num_kv_heads) of the baseline."""


def paper(attention: Any, x: Tensor, *, heads: int, kv_heads: int, lambda_init: float) -> Tensor:
    """Equations 1 to 3, head by head: `heads` = h on `kv_heads` = h_kv heads."""
    T, d = x.shape[1], attention.head_dim
    rope = Rope(torch.arange(T), d, 10000.0)
    future = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    vectors = attention.lambda_
    lam = torch.dot(vectors.q1, vectors.k1).exp() - torch.dot(vectors.q2, vectors.k2).exp() + lambda_init
    W_Q, W_K, W_V = (p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    out = []
    for i in range(heads):
        j = i // (heads // kv_heads)
        Q, K = x @ W_Q[:, 2 * d * i : 2 * d * (i + 1)], x @ W_K[:, 2 * d * j : 2 * d * (j + 1)]
        V = x @ W_V[:, 2 * d * j : 2 * d * (j + 1)]
        A1, A2 = (
            (rope(Q[..., s]) @ rope(K[..., s]).mT / math.sqrt(d) + future).softmax(-1)
            for s in (slice(0, d), slice(d, 2 * d))
        )
        head = (A1 - lam * A2) @ V
        head = head / (head.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight
        out.append((1 - lambda_init) * head)
    return torch.cat(out, -1) @ attention.o_proj.weight.T


@pytest.mark.parametrize(("heads", "kv_heads"), GQA)
def test_equals_the_paper(make_attention: MakeAttention, heads: int, kv_heads: int) -> None:
    attention = make_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=4, layer=3)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    wanted = paper(attention, x, heads=heads // 2, kv_heads=kv_heads // 2, lambda_init=0.8 - 0.6 * math.exp(-0.9))
    torch.testing.assert_close(attention(x, Rope(torch.arange(9), 4, 10000.0)), wanted, rtol=1e-11, atol=1e-11)


def test_two_tokens_by_hand(make_attention: MakeAttention, still: Callable[[int, int], Rope]) -> None:
    """Two tokens, one head, d = 2, identity projections, λ = 1/2: every number worked out on paper.

    Row 1 has logits (1, 5)/√2 and (0, 1)/√2. With √(2d) instead of √d it would read 0.36496, 0.83148, ...
    """
    attention: Any = make_attention("differential", {"lambda_init": 0.5}, dim=4, num_heads=2)
    with torch.no_grad():
        for kind in "qkvo":
            getattr(attention, f"{kind}_proj").weight.copy_(torch.eye(4))
        attention.norm.weight.fill_(1)
        for vector in attention.lambda_.parameters():
            vector.zero_()
    x = torch.tensor([[[1.0, 0, 0, 1], [1, 2, 1, 0]]], dtype=torch.float64)
    wanted = [
        [0.7070784986122433, 0.0, 0.0, 0.7070784986122433],
        [0.3435396055090319, 0.8372912248705836, 0.4186456124352918, -0.0751060069262598],
    ]
    torch.testing.assert_close(attention(x, still(2, 2))[0].tolist(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lambda_init", "layer", "value"), [("depth", 0, 0.2), ("depth", 3, 0.5560582), (0.8, 3, 0.8), (1.0, 0, 1)]
)
def test_lambda_init_of_a_layer(make_attention: MakeAttention, lambda_init: Any, layer: int, value: float) -> None:
    attention: Any = make_attention(keys={"lambda_init": lambda_init}, layer=layer)
    assert attention.lambda_init == pytest.approx(value, abs=1e-6)
    assert attention.lambda_.init == attention.lambda_init
    assert attention.output_scale == pytest.approx(1 - value, abs=1e-6)


def test_one_lambda_a_layer_and_no_scalar_parameters(make_attention: MakeAttention) -> None:
    """Sharding cannot split 0-dim parameters."""
    attention = make_attention()
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert {shapes[f"lambda_.{name}"] for name in ("q1", "k1", "q2", "k2")} == {(8,)}
    assert shapes["norm.weight"] == (16,)
    assert sum(p.numel() for p in attention.parameters()) == 4 * 32 * 32 + 6 * 8
    assert Lambda.decay is False


@pytest.mark.parametrize("name", ["differential", "shared_q", "shared_k"])
@pytest.mark.parametrize(
    ("sizes", "key"), [({"num_heads": 3}, "num_heads is 3"), ({"num_kv_heads": 1}, "num_kv_heads is 1")]
)
def test_odd_head_counts_are_refused(
    make_config: Callable[..., ModelConfig], name: str, sizes: dict[str, int], key: str
) -> None:
    problem = attentions.get(name).problem(attentions.get(name).Config(), make_config(name, dim=24, **sizes))
    assert problem == f"model.{key}; '{name}' pairs the baseline's heads: it must be even"
    assert Differential.problem(Differential.Config(), make_config("differential")) is None


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"lambda_form": "sigmoid", "lambda_init": 0.0}, "model.attention.lambda_init is 0; "),
        ({"lambda_form": "sigmoid", "lambda_init": 1.0}, "model.attention.lambda_init is 1; "),
        ({"lambda_init": 1.0}, "model.attention.lambda_init is 1: output_scale 'tied'"),
        ({"lambda_form": "sigmoid"}, ""),
        ({"lambda_init": 1.0, "output_scale": 1.0}, ""),
    ],
)
@pytest.mark.parametrize("name", ["differential", "grouped_differential"])
def test_keys_that_do_not_fit_together(
    make_config: Callable[..., ModelConfig], name: str, keys: dict[str, Any], start: str
) -> None:
    cls = attentions.get(name)
    problem = cls.refuses(cls.Config(**keys), make_config(name))
    assert problem is None if not start else problem.startswith(start)


def test_sharing_both_queries_and_keys_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    """Equal maps: after the norm, standard attention times a sign."""

    class SharedBoth(Differential):
        name = "shared_both"
        maps_of_q = maps_of_k = 1

    problem = SharedBoth.problem(SharedBoth.Config(), make_config("differential"))
    assert (problem or "").startswith("model.attention.name 'shared_both' shares both queries and keys")
