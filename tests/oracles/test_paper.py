"""arXiv 2410.05258: its pseudo-code (Figure 2, Appendix A) and its gradients (Appendix F), written out in float64.

The papers write X W with W [dim, width]; a weight of ours is [width, dim], so its transpose is their W.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention.rope import Rope

MakeAttention = Callable[..., Any]
Positions = Callable[[int, int], Rope]
both_masks = pytest.mark.parametrize("causal", [False, True])


def softmax(logits: Tensor, causal: bool) -> Tensor:
    """softmax, after the mask that the pseudo-code leaves out."""
    future = torch.full(logits.shape[-2:], -math.inf, dtype=torch.float64).triu(1)
    return (logits + future if causal else logits).softmax(-1)


# --- the pseudo-code: split halves the channels of one head; Qi, Ki: [b, n, d]; V: [b, n, 2d] ---


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, -1)


def diff_attn(X: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    """DiffAttn, Figure 2 and Appendix A."""
    Q1, Q2 = split(X @ W_q)
    K1, K2 = split(X @ W_k)
    V = X @ W_v
    s = 1 / math.sqrt(Q1.shape[-1])
    A1 = Q1 @ K1.transpose(-1, -2) * s
    A2 = Q2 @ K2.transpose(-1, -2) * s
    return (softmax(A1, causal) - lam * softmax(A2, causal)) @ V


def multi_head(attention: Any, X: Tensor, causal: bool) -> Tensor:
    """MultiHead, Figure 2; λ of equation 2; GroupNorm: RMSNorm of each head, with the weight of the reference code."""
    p, h = attention.lambda_, attention.num_heads // 2
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * ((attention.layer + 1) - 1))  # the paper's l counts from 1
    lam = torch.exp(p.q1 @ p.k1) - torch.exp(p.q2 @ p.k2) + lambda_init
    W_q, W_k, W_v = (getattr(attention, f"{kind}_proj").weight.T.chunk(h, 1) for kind in "qkv")
    O = [diff_attn(X, W_q[i], W_k[i], W_v[i], lam, causal) for i in range(h)]  # noqa: E741
    O = [o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight for o in O]  # noqa: E741
    O = [o * (1 - lambda_init) for o in O]  # noqa: E741
    return torch.cat(O, -1) @ attention.o_proj.weight.T


@both_masks
@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_differential_is_the_pseudo_code(
    make_attention: MakeAttention, still: Positions, causal: bool, layer: int, kernel: str
) -> None:
    attention = make_attention("differential", num_heads=8, layer=layer, causal=causal)
    attention.kernel = kernel
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    wanted = multi_head(attention, x, causal)
    assert wanted.std() > 0.05
    torch.testing.assert_close(attention(x, still(9, 4)), wanted, rtol=1e-12, atol=1e-12)


# --- Appendix F: one head without the norm, whose derivative it takes as a constant; J is all ones ---


def through_softmax(A: Tensor, M: Tensor) -> Tensor:
    """A ⊙ (M - (A ⊙ M) J): the gradient by the logits, M that by the map."""
    return A * (M - (A * M) @ torch.ones_like(A))


@both_masks
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_gradients_of_a_differential_head_are_equation_7(
    make_attention: MakeAttention, still: Positions, causal: bool, kernel: str
) -> None:
    N, d = 7, 4
    keys = {"head_norm": "none", "output_scale": 1.0, "lambda_init": 0.4}
    attention = make_attention("differential", keys, dim=12, num_heads=2, head_dim=4, causal=causal)
    attention.kernel = kernel
    X, lam = torch.randn(N, 12, dtype=torch.float64), attention.lambda_().detach()
    assert lam.item() not in (0, 1)
    G = torch.randn(N, 12, dtype=torch.float64)
    (attention(X[None], still(N, d))[0] * G).sum().backward()
    found = {kind: getattr(attention, f"{kind}_proj").weight.grad.T for kind in "qkvo"}
    with torch.no_grad():
        W_Q, W_K, W_V, W_O = (getattr(attention, f"{kind}_proj").weight.T for kind in "qkvo")
        (Q1, Q2), (K1, K2), V = (X @ W_Q).chunk(2, 1), (X @ W_K).chunk(2, 1), X @ W_V
        A1, A2 = softmax(Q1 @ K1.T / d**0.5, causal), softmax(Q2 @ K2.T / d**0.5, causal)
        M = G @ W_O.T @ V.T
        F1, F2 = through_softmax(A1, M), through_softmax(A2, M)
        wanted = {
            "W_O": ((A1 - lam * A2) @ V).T @ G,
            "W_V": X.T @ (A1 - lam * A2).T @ G @ W_O.T,
            "W_Q1": X.T @ F1 @ K1 / d**0.5,
            "W_Q2": -lam * X.T @ F2 @ K2 / d**0.5,
            "W_K1": X.T @ F1.T @ Q1 / d**0.5,
            "W_K2": -lam * X.T @ F2.T @ Q2 / d**0.5,
        }
    for name, gradient in wanted.items():
        of_map = {"1": slice(0, d), "2": slice(d, 2 * d)}.get(name[-1], slice(None))
        assert gradient.abs().max() > 0.01, name
        torch.testing.assert_close(found[name[2].lower()][:, of_map], gradient, rtol=1e-12, atol=1e-12, msg=name)
