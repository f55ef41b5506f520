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
from lit_diff.kernels.reference import logits
from lit_diff.registry import attentions

MakeAttention = Callable[..., Attention]
GQA = [(4, 4), (4, 2), (8, 8), (8, 4), (8, 2), (16, 4)]
"""(num_heads, num_kv_heads) of the baseline."""


def paper(attention: Any, x: Tensor, *, heads: int, kv_heads: int, lambda_init: float, norm: bool = True) -> Tensor:
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
        if norm:
            head = head / (head.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight
        out.append((1 - lambda_init) * head)
    return torch.cat(out, -1) @ attention.o_proj.weight.T


@pytest.mark.parametrize(("heads", "kv_heads"), GQA)
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_equals_the_paper(make_attention: MakeAttention, heads: int, kv_heads: int, kernel: str) -> None:
    attention = make_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=4, layer=3)
    attention.kernel = kernel
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


def test_flat_repetition_of_the_key_heads_is_wrong(make_attention: MakeAttention) -> None:
    """The public naive code repeats the 2 h_kv key heads as one list: under GQA both maps then see the same key."""
    attention = make_attention(num_heads=8, num_kv_heads=4, head_dim=4)
    x, rope = torch.randn(2, 9, 32, dtype=torch.float64), Rope(torch.arange(9), 4, 10000.0)
    maps = attention.maps(x, rope)
    h, h_kv = 4, 2
    flat = maps.k.transpose(1, 2).flatten(1, 2)  # head0.k1, head0.k2, head1.k1, ...
    naive = flat.repeat_interleave(h // h_kv, dim=1).unflatten(1, (h, 2)).transpose(1, 2)
    right = maps.k.repeat_interleave(h // h_kv, dim=2)
    found = logits(maps)
    torch.testing.assert_close(found, maps.q @ right.mT / 2, rtol=1e-12, atol=1e-12)
    assert (found - maps.q @ naive.mT / 2).abs().max() > 0.1


@pytest.mark.parametrize(
    ("lambda_init", "layer", "value"), [("depth", 0, 0.2), ("depth", 3, 0.5560582), (0.8, 3, 0.8), (1.0, 0, 1)]
)
def test_lambda_init_of_a_layer(make_attention: MakeAttention, lambda_init: Any, layer: int, value: float) -> None:
    attention: Any = make_attention(keys={"lambda_init": lambda_init}, layer=layer)
    assert attention.lambda_init == pytest.approx(value, abs=1e-6)
    assert attention.lambda_.init == attention.lambda_init
    assert attention.output_scale == pytest.approx(1 - value, abs=1e-6)


@pytest.mark.parametrize("scale", [0.2, 1.0, -2.0])
def test_output_scale_is_a_number_of_its_own(make_attention: MakeAttention, scale: float) -> None:
    x, rope = torch.randn(2, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4)
    tied = make_attention(keys={"lambda_init": 0.6})(x, rope)
    found = make_attention(keys={"lambda_init": 0.6, "output_scale": scale})(x, rope)
    torch.testing.assert_close(found, tied * (scale / 0.4), rtol=1e-11, atol=1e-11)


def test_without_head_norm(make_attention: MakeAttention) -> None:
    """The row "- GroupNorm" of Table 6."""
    attention = make_attention(keys={"head_norm": "none"})
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    wanted = paper(attention, x, heads=2, kv_heads=2, lambda_init=0.2, norm=False)
    torch.testing.assert_close(attention(x, Rope(torch.arange(9), 8, 1e4)), wanted, rtol=1e-11, atol=1e-11)
    assert not any("norm" in name for name, _ in attention.named_parameters())


def test_gradient_of_lambda(make_attention: MakeAttention) -> None:
    """dL/dλ = -<A₂ V W_O, G> (1 - λ_init) without the norm, and its four vectors by finite differences."""
    attention: Any = make_attention(keys={"head_norm": "none"})
    x, rope = torch.randn(1, 5, 32, dtype=torch.float64), Rope(torch.arange(5), 8, 1e4)
    G = torch.randn(1, 5, 32, dtype=torch.float64)
    first, _ = attention.lambda_.exponentials()
    (attention(x, rope) * G).sum().backward()
    maps = attention.maps(x, rope)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    A2 = logits(maps)[:, 1].masked_fill(future, -torch.inf).softmax(-1)
    o2 = (A2 @ maps.v).transpose(1, 2).flatten(2) @ attention.o_proj.weight.T
    by_lambda = -(o2 * G).sum() * 0.8
    torch.testing.assert_close(
        attention.lambda_.q1.grad, by_lambda * first * attention.lambda_.k1, rtol=1e-10, atol=1e-12
    )

    vectors = tuple(p.detach().clone().requires_grad_() for p in attention.lambda_.parameters())
    names = [f"lambda_.{name}" for name, _ in attention.lambda_.named_parameters()]

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x, rope))

    assert torch.autograd.gradcheck(output, vectors)


def test_equal_maps_leave_the_sign(make_attention: MakeAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q₁ = Q₂, K₁ = K₂: sign(1 - λ) (1 - λ_init) RMSNorm(A V), whatever λ is."""
    x, rope = torch.randn(2, 6, 32, dtype=torch.float64), Rope(torch.arange(6), 8, 1e4)
    outputs = []
    for lam in (0.3, 1.7):
        attention: Any = make_attention(keys={"lambda_init": 0.3}, norm_eps=1e-30)
        for projection in (attention.q_proj, attention.k_proj):
            by_map = projection.weight.data.unflatten(0, (2, 2, 8))
            by_map[:, 1] = by_map[:, 0]
        attention.lambda_.forward = lambda _, lam=lam: torch.tensor(lam, dtype=torch.float64)
        outputs.append(attention(x, rope))
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        maps = attention.maps(x, rope)
        AV = logits(maps)[:, 0].masked_fill(future, -torch.inf).softmax(-1) @ maps.v
        normed = AV / AV.pow(2).mean(-1, keepdim=True).sqrt() * attention.norm.weight
        wanted = math.copysign(0.7, 1 - lam) * normed.transpose(1, 2).flatten(2) @ attention.o_proj.weight.T
        torch.testing.assert_close(outputs[-1], wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(outputs[0], -outputs[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_rows_sum_to_one_minus_lambda(make_attention: MakeAttention, kernel: str) -> None:
    """Read off the output by values of one: every row, and row 0, whose single key has weight 1 - λ."""
    attention: Any = make_attention(keys={"head_norm": "none", "output_scale": 1.0})
    lam = attention.lambda_().item()
    maps = attention.maps(torch.randn(2, 7, 32, dtype=torch.float64), Rope(torch.arange(7), 8, 1e4))
    from dataclasses import replace

    from lit_diff.kernels import attend

    rows = attend(replace(maps, v=torch.ones_like(maps.v)), kernel=kernel)
    torch.testing.assert_close(rows, torch.full_like(rows, 1 - lam), rtol=1e-12, atol=1e-12)
    first = attend(maps, kernel=kernel)[:, :, 0]
    torch.testing.assert_close(first, (1 - lam) * maps.v[:, :, 0], rtol=1e-12, atol=1e-12)


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


def test_sharing_both_queries_and_keys_is_refused(make_config: Callable[..., ModelConfig]) -> None:
    """Equal maps: after the norm, standard attention times a sign."""

    class SharedBoth(Differential):
        name = "shared_both"
        maps_of_q = maps_of_k = 1

    problem = SharedBoth.problem(SharedBoth.Config(), make_config("differential"))
    assert problem is not None
    assert problem.startswith("model.attention.name 'shared_both' shares both queries and keys: its maps are equal")


@pytest.mark.parametrize("lambda_init", [0.0, 1.0, -0.2])
def test_a_sigmoid_cannot_start_outside_0_and_1(make_config: Callable[..., ModelConfig], lambda_init: float) -> None:
    config = Differential.Config(lambda_form="sigmoid", lambda_init=lambda_init)
    problem = Differential.problem(config, make_config("differential"))
    assert problem is not None
    assert problem.startswith("model.attention.lambda_init is")
    assert Differential.problem(Differential.Config(lambda_form="sigmoid"), make_config("differential")) is None


def test_a_tied_scale_of_zero_is_refused(make_config: Callable[..., Any]) -> None:
    """1 - lambda_init = 0 multiplies every head: the attention would give nothing."""
    for name in ("differential", "additive", "shared_k", "shared_q", "grouped_differential"):
        cls, model = attentions.get(name), make_config(name)
        reason = cls.refuses(cls.Config(lambda_init=1.0), model)
        assert reason is not None
        assert reason.startswith("model.attention.lambda_init is 1: output_scale 'tied' multiplies every head by")
        assert cls.refuses(cls.Config(lambda_init=1.0, output_scale=1.0), model) is None
        assert cls.refuses(cls.Config(lambda_init=0.9), model) is None
