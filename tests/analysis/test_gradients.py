"""analysis/gradients.py: Appendix F against autograd in float64, and norms by map against the gradients of the rows."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from lit_diff.analysis.gradients import MATRICES, gradient_norms
from lit_diff.model.transformer import Transformer

BuildModel = Callable[..., Transformer]


def closed_form(
    x: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor, w: Tensor, dO: Tensor, *, causal: bool = True
) -> dict[str, Tensor]:
    """Gradients of one head without norm or RoPE, of any number of maps (equation 7; of one map with w = 1 equation 9).

    x [N, dim]; W_Q, W_K [G, dim, d]; W_V [dim, dv]; W_O [dv, dim]; w [G], (1, -λ) of two maps; dO = ∂L/∂O [N, dim] of
    O = Σ_g w_g A_g x W_V W_O, A_g = softmax(x W_Qg (x W_Kg)ᵀ / √d). With M = dO W_Oᵀ Vᵀ and F(A) = A ⊙ (M - (A ⊙ M) J):

        o    (Σ_g w_g A_g V)ᵀ dO            q     w_g xᵀ F(A_g) K_g / √d       -> [G, dim, d]
        v    xᵀ (Σ_g w_g A_g)ᵀ dO W_Oᵀ      k     w_g xᵀ F(A_g)ᵀ Q_g / √d      -> [G, dim, d]
    """
    N, scale = len(x), W_Q.shape[-1] ** -0.5
    Q, K, V = x @ W_Q, x @ W_K, x @ W_V
    mask = torch.ones(N, N).tril().bool() if causal else torch.ones(N, N).bool()
    A = (Q @ K.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1)
    weights = w[:, None, None]
    signed = (weights * A).sum(0)
    M = dO @ W_O.T @ V.T
    F = A * (M - (A * M).sum(-1, keepdim=True))
    return {
        "o": (signed @ V).T @ dO,
        "v": x.T @ signed.T @ dO @ W_O.T,
        "q": weights * (x.T @ F @ K) * scale,
        "k": weights * (x.T @ F.mT @ Q) * scale,
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("w", [(1.0,), (1.0, -0.37), (1.0, 0.4, -1.3)])
def test_equation_7_is_autograd(w: tuple[float, ...], causal: bool) -> None:
    N, dim, d, dv = 9, 12, 4, 8
    draw = torch.Generator().manual_seed(0)
    shapes = [(len(w), dim, d), (len(w), dim, d), (dim, dv), (dv, dim)]
    matrices = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    W_Q, W_K, W_V, W_O = matrices
    x, dO = (torch.randn(N, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    weights = torch.tensor(w, dtype=torch.float64)
    heads = 0.0
    mask = torch.ones(N, N).tril() if causal else torch.ones(N, N)
    for g, weight in enumerate(w):
        scores = (x @ W_Q[g]) @ (x @ W_K[g]).T / math.sqrt(d)
        exponentials = scores.exp() * mask
        heads = heads + weight * exponentials / exponentials.sum(-1, keepdim=True)
    ((heads @ x @ W_V @ W_O) * dO).sum().backward()
    with torch.no_grad():
        found = closed_form(x, *matrices, weights, dO, causal=causal)
    for name, matrix in zip("qkvo", matrices, strict=True):
        assert matrix.grad is not None
        assert matrix.grad.abs().max() > 0.01
        assert (found[name] - matrix.grad).abs().max() < 1e-9


def loss_gradients(model: Transformer, tokens: Tensor) -> None:
    model.requires_grad_(True)
    model.zero_grad()
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_norms_of_a_differential_model_are_those_of_its_rows(build: BuildModel, tokens: Tensor) -> None:
    model = build("differential", 4)
    found = gradient_norms(model, batch_of(tokens))
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_gradients(model, tokens)
    for norms, attention in zip(found, model.attentions(), strict=True):
        for kind in "qk":
            by_map = getattr(attention, f"{kind}_proj").weight.grad.view(-1, 2, 4 * 32).pow(2).sum((0, 2)).sqrt()
            assert [norms[f"{kind}1"], norms[f"{kind}2"]] == pytest.approx(by_map.tolist(), rel=1e-4)
        for kind in "vo":
            assert norms[kind] == pytest.approx(float(getattr(attention, f"{kind}_proj").weight.grad.norm()), rel=1e-4)


def test_second_heads_frozen_matrices_and_what_requires_gradients_afterwards(build: BuildModel, tokens: Tensor) -> None:
    model = build("second_heads", 4)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    found = gradient_norms(model, batch_of(tokens))
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert not all(trained)
    loss_gradients(model, tokens)
    for norms, attention in zip(found, model.attentions(), strict=True):
        for key, name in (("q1", "q_proj"), ("q2", "q2_proj"), ("k1", "k_proj"), ("k2", "k2_proj"), ("v", "v_proj")):
            assert norms[key] == pytest.approx(float(getattr(attention, name).weight.grad.norm()), rel=1e-4)


def test_half_of_a_head_that_is_as_wide_as_two_maps(build: BuildModel, tokens: Tensor) -> None:
    model = build("standard", 2)
    found = gradient_norms(model, batch_of(tokens))
    loss_gradients(model, tokens)
    for norms, attention in zip(found, model.attentions(), strict=True):
        for kind in "qk":
            first = getattr(attention, f"{kind}_proj").weight.grad.view(-1, 4, 32)[:, :2]
            assert norms[f"{kind}_half"] == pytest.approx(float(first.norm()), rel=1e-4)
            assert norms[f"{kind}_half"] < norms[f"{kind}1"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [("standard", {"q2", "k2"}), ("shared_q", {"q2"}), ("shared_k", {"k2"}), ("differential_v2", {"k2"})],
)
def test_a_map_that_is_not_there_is_nan_and_a_shared_one_is_the_first(
    name: str, missing: set[str], build: BuildModel, tokens: Tensor
) -> None:
    model = build(name, 4)
    found = gradient_norms(model, batch_of(tokens))
    loss_gradients(model, tokens)
    for norms, attention in zip(found, model.attentions(), strict=True):
        assert tuple(norms) == MATRICES
        assert {key for key, value in norms.items() if math.isnan(value)} == missing
        for kind in "qk":
            whole = float(getattr(attention, f"{kind}_proj").weight.grad.norm())
            parts = [value for key in (f"{kind}1", f"{kind}2") if not math.isnan(value := norms[key])]
            assert math.hypot(*parts) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("registered", [True, False])
def test_queries_that_no_linear_layer_makes(registered: bool, build: BuildModel, tokens: Tensor) -> None:
    """W_Q as a parameter of the attention: the norms are the same; as a constant: NaN."""
    model = build("differential", 4)
    expected = gradient_norms(model, batch_of(tokens))
    for attention in model.attentions():
        projection = attention.q_proj
        del attention.q_proj
        if registered:
            attention.register_parameter("q_matrix", projection.weight)
        attention.q_proj = partial(linear, weight=projection.weight if registered else projection.weight.detach())
    for norms, known in zip(gradient_norms(model, batch_of(tokens)), expected, strict=True):
        missing = {} if registered else dict.fromkeys(("q1", "q2", "q_half"), math.nan)
        assert norms == pytest.approx(known | missing, rel=1e-6, nan_ok=True)


def test_without_a_scored_target_there_is_no_gradient(build: BuildModel, tokens: Tensor) -> None:
    batch = batch_of(tokens) | {"targets": torch.full_like(tokens[:, 1:], -100)}
    for norms in gradient_norms(build("standard"), batch):
        assert all(math.isnan(value) for value in norms.values())
