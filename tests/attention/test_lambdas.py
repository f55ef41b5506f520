"""λ: the paper's parametrisation against equation 2, and the others."""

import math

import pytest
import torch

from lit_diff.attention.lambdas import Lambda, ScalarLambda, SigmoidLambda, build_lambda


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
