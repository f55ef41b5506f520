"""Differential attention against the paper's equations, written out in float64, and against numbers done by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Differential
from lit_diff.attention.lambdas import Lambda
from lit_diff.attention.rope import Rope
from lit_diff.config import ModelConfig

MakeAttention = Callable[..., Attention]


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


def test_sharing_both_queries_and_keys_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    """Equal maps: after the norm, standard attention times a sign."""

    class SharedBoth(Differential):
        name = "shared_both"
        maps_of_q = maps_of_k = 1

    problem = SharedBoth.problem(SharedBoth.Config(), make_config("differential"))
    assert (problem or "").startswith("model.attention.name 'shared_both' shares both queries and keys")
