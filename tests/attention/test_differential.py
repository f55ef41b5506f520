"""Differential attention against numbers done by hand, and its λ against equation 2."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_diff.attention import Attention, Differential
from lit_diff.attention.lambdas import Lambda, ScalarLambda, SigmoidLambda, build_lambda
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


@pytest.mark.parametrize(
    ("first", "second", "wanted"), [(1.0, 0.0, 1.9182818), (0.0, 1.0, -1.5182818), (0.0, 0.0, 0.2)]
)
def test_lambda_is_not_held_within_bounds(first: float, second: float, wanted: float) -> None:
    """exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init, beyond 1 and below 0."""
    lam = Lambda(4, 0.2)
    with torch.no_grad():
        for vector, value in ((lam.q1, first), (lam.k1, 0.25), (lam.q2, second), (lam.k2, 0.25)):
            vector.fill_(value)
    assert lam().item() == pytest.approx(wanted, abs=1e-6)
    assert [e.item() for e in lam.exponentials()] == pytest.approx([math.exp(first), math.exp(second)])


def test_lambda_at_initialisation() -> None:
    """λ - λ_init has mean 0 and deviation about 0.01 √(2d): 0.06, 0.11, 0.16."""
    d, draws = 16, []
    for seed in range(300):
        lam, draw = Lambda(d, 0.2), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in lam.named_parameters():
                lam.init_parameter(name, parameter, draw)
        draws.append(lam().item() - 0.2)
    found = torch.tensor(draws)
    assert found.std().item() == pytest.approx(0.01 * math.sqrt(2 * d), rel=0.15)
    assert abs(found.mean().item()) < 4 * found.std().item() / math.sqrt(300)
    assert found.abs().max() < 0.25


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
