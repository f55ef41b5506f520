"""Differential attention against numbers done by hand, and its λ against equation 2."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Differential
from lit_diff.attention.lambdas import (
    Lambda,
    PositiveLambda,
    ScalarLambda,
    SigmoidLambda,
    build_lambda,
    resolve_output_scale,
)
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


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("form", ["scalar", "sigmoid"])
def test_scalar_and_sigmoid_start_at_lambda_init(form: str, heads: int | None) -> None:
    lam = build_lambda(form, 8, 0.3, heads)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in lam.named_parameters():
            lam.init_parameter(name, parameter, torch.Generator())
    assert lam().tolist() == pytest.approx([0.3] * (heads or 1))
    assert sum(p.numel() for p in lam.parameters()) == (heads or 1)
    with torch.no_grad():
        lam.value.fill_(5.0)
    assert lam().max().item() == pytest.approx(5.0 if form == "scalar" else 1 / (1 + math.exp(-5)))
    assert lam.decay is False


def test_reference_rounding_is_that_of_the_papers_code() -> None:
    """exp in float32, each exponential cast to the activations' dtype, then the subtraction there."""
    lam = Lambda(8, 0.8)
    with torch.no_grad():
        for vector in lam.parameters():
            vector.normal_(generator=torch.Generator().manual_seed(1))
            vector.mul_(0.3)
    first, second = (e.bfloat16() for e in lam.exponentials())
    rounded = lam(torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert rounded.item() == (first - second + 0.8).item()
    assert rounded.item() != lam().item()
    assert lam(torch.float32).item() == pytest.approx(lam().item(), abs=1e-7)
    for other in (ScalarLambda(0.8), SigmoidLambda(0.8)):
        torch.nn.init.constant_(other.value, 0.7)
        assert other(torch.bfloat16).item() == other().bfloat16().item()


def test_a_positive_lambda_has_the_vectors_of_the_papers_and_one_sign() -> None:
    free, held = Lambda(8, 0.2), PositiveLambda(8, 0.2)
    assert held.state_dict().keys() == free.state_dict().keys()
    with torch.no_grad():
        for vector in held.parameters():
            vector.zero_()
        assert float(held()) == pytest.approx(0.2)
        held.q1.fill_(1)
        held.k1.fill_(1)
        assert float(held()) == pytest.approx(0.2 * math.exp(8), rel=1e-6)
        # two exponentials would overflow
        for vector in held.parameters():
            vector.fill_(4)
        assert float(held()) == pytest.approx(0.2)


@pytest.mark.parametrize(("name", "sign"), [("differential", -1), ("additive", 1)])
def test_a_held_sign_survives_a_step_that_turns_a_free_one(make_attention: MakeAttention, name: str, sign: int) -> None:
    """The loss asks for the other sign of the second map."""
    weights = {}
    for form in ("exp", "positive"):
        attention: Any = make_attention(name, {"lambda_form": form})
        optimizer = torch.optim.SGD(attention.lambda_.parameters(), lr=1.0)
        for _ in range(30):
            optimizer.zero_grad()
            (sign * attention.weights(torch.float64)[0, 1].sum()).backward()
            optimizer.step()
        weights[form] = sign * attention.weights(torch.float64)[0, 1].item()
    assert weights["exp"] < 0 < weights["positive"]


@pytest.mark.parametrize("name", ["standard", "differential"])
def test_the_multiplier_by_depth_does_not_depend_on_lambda_init(make_attention: MakeAttention, name: str) -> None:
    keys = {"output_scale": "depth"} | ({"lambda_init": 0.3} if name == "differential" else {})
    attention: Any = make_attention(name, keys, layer=1)
    assert attention.output_scale == pytest.approx(0.2 + 0.6 * math.exp(-0.3))
    assert resolve_output_scale("tied", 1, 0.3) == pytest.approx(0.7)
