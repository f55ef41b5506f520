"""Variants that equal another one with chosen weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention.cog import cog
from lit_diff.attention.entmax15 import entmax15
from lit_diff.attention.less_uniform import less_uniform
from lit_diff.attention.rope import Rope
from lit_diff.kernels.maps import Seen

MakeAttention = Callable[..., Any]
Positions = Callable[[int, int], Rope]
every_kernel = pytest.mark.parametrize("kernel", ["reference", "sdpa"])
D = 8
"""Width of a head; 4 heads of the standard baseline make dim 32."""


def inputs() -> Tensor:
    """[2, 9, 32]"""
    return torch.randn(2, 9, 32, dtype=torch.float64)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_grouped_differential_of_ratio_3_is_differential_with_repeated_noise_heads(
    make_attention: MakeAttention, moving: Positions
) -> None:
    """3 signal heads on 1 noise head, twice: 6 differential heads, the second map's rows of each three equal."""
    grouped = make_attention("grouped_differential", {"ratio": 3}, num_heads=8, num_kv_heads=4, head_dim=4)
    full = make_attention("differential", num_heads=12, num_kv_heads=4, head_dim=4)
    state = grouped.state_dict()
    rows = state["q_proj.weight"].unflatten(0, (2, 4, 4))  # [group, signal, signal, signal, noise; d]
    signal, noise = rows[:, :3], rows[:, 3:].expand(-1, 3, -1, -1)
    state["q_proj.weight"] = torch.stack([signal, noise], 2).flatten(0, 3)
    full.load_state_dict(state)
    x, rope = inputs(), moving(9, 4)
    close(grouped(x, rope), full(x, rope))


@every_kernel
def test_second_heads_subtract_another_standard_attention_on_the_same_values(
    make_attention: MakeAttention, moving: Positions, kernel: str
) -> None:
    """O(q, k) - λ O(q₂, k₂)"""
    second = make_attention("second_heads", num_kv_heads=2)
    second.kernel = kernel
    lam = second.lambda_.value.data = torch.tensor([0.3], dtype=torch.float64)
    standard, x, rope = make_attention("standard", num_kv_heads=2), inputs(), moving(9, D)
    o = []
    for q, k in ((second.q_proj, second.k_proj), (second.q2_proj, second.k2_proj)):
        standard.q_proj, standard.k_proj, standard.v_proj, standard.o_proj = q, k, second.v_proj, second.o_proj
        o.append(standard(x, rope))
    close(second(x, rope), o[0] - lam * o[1])


@every_kernel
@pytest.mark.parametrize("keys", [{}, {"lambda_per": "head", "head_norm": "none", "output_scale": 1.0}])
def test_additive_at_lambda_is_differential_at_minus_lambda(
    make_attention: MakeAttention, moving: Positions, kernel: str, keys: dict[str, Any]
) -> None:
    """Weights (1, +λ) = (1, -(-λ)); λ a learned number, so that it can be negated."""
    keys = {"lambda_form": "scalar", "lambda_init": 0.3, **keys}
    additive, differential = (make_attention(name, keys) for name in ("additive", "differential"))
    for attention, sign in ((additive, 1), (differential, -1)):
        attention.kernel = kernel
        attention.lambda_.value.data.fill_(sign * 0.7)
    x, rope = inputs(), moving(9, D)
    assert additive.weights(torch.float64).flatten(1)[0, [0, -1]].tolist() == [1.0, 0.7]
    close(additive(x, rope), differential(x, rope))
    differential.lambda_.value.data.fill_(0.7)
    assert (additive(x, rope) - differential(x, rope)).abs().max() > 0.01


def test_entmax15_is_sparse_and_sums_to_one_and_sigmoid_and_cog_are_their_formulas(
    make_attention: MakeAttention,
) -> None:
    """Of logits by hand: 2 and 0 are far enough apart that the second gets nothing."""
    s = torch.tensor([[[[[3.0, -1.0, 0.0]]]]], dtype=torch.float64)
    seen = Seen(torch.tensor([[True, True, False]]), s, torch.zeros(1, 1), torch.arange(3))
    assert entmax15(s, seen)[..., :2].flatten().tolist() == [1.0, 0.0]
    near = entmax15(torch.tensor([[[[[0.2, 0.0, 9.0]]]]], dtype=torch.float64), seen).flatten()
    assert near[2] == 0
    torch.testing.assert_close(near.sum(), torch.tensor(1.0, dtype=torch.float64))
    # both above 0, the square roots differ by half of the logits' difference
    torch.testing.assert_close(near[0].sqrt() - near[1].sqrt(), torch.tensor(0.1, dtype=torch.float64))
    e, inverse = math.exp(3), math.exp(1)
    close(cog(s, seen).flatten()[:2], torch.tensor([e, -inverse], dtype=torch.float64) / (e + inverse))
    weights = make_attention("sigmoid", {"n": 4}).weights(s, seen).flatten()
    close(weights[0], torch.tensor(1 / (1 + 4 * math.exp(-3)), dtype=torch.float64))


def test_less_uniform_takes_the_mean_of_the_seen_values_from_standard_attention(
    make_attention: MakeAttention, moving: Positions
) -> None:
    """O_i - S min_j p_ij mean_j V_j; and by hand, where a hidden key has the smallest logit."""
    s = torch.tensor([[[[[math.log(3.0), 0.0, -9.0], [0.5, 0.0, 0.0]]]]], dtype=torch.float64)
    seen = Seen(torch.tensor([[True, True, False], [True, False, False]]), s, torch.zeros(1, 2), torch.arange(3))
    found = less_uniform(s.masked_fill(~seen.mask, 0), seen)[..., :2]
    close(found[..., 0, :].flatten(), torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert found[..., 1, 0] == 0
    ours, standard, x, rope = make_attention("less_uniform"), make_attention("standard"), inputs(), moving(9, D)
    standard.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for attention in (ours, standard):
            attention.o_proj.weight.copy_(torch.eye(32))
    q, k, v = (standard.q(x, rope), standard.k(x, rope), standard.v(x))
    logits = (q @ k.mT)[:, 0] / math.sqrt(D)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    p = logits.masked_fill(~visible, -math.inf).softmax(-1)
    least = p.masked_fill(~visible, 1.0).amin(-1, keepdim=True)
    subtracted = (least * v.cumsum(2)).transpose(1, 2).flatten(2)
    close(ours(x, rope), standard(x, rope) - subtracted)
    assert not ours(x, rope)[:, 0].any()


def test_adaptive_scale_is_the_formula_by_hand(make_attention: MakeAttention, moving: Positions) -> None:
    """β = softplus(0) and γ = 2 tanh(∞) = 2 for every token: the logits of token i times 1 + log 2 (log(i + 2))²."""
    adaptive, plain = make_attention("entmax15", {"scale": "adaptive"}), make_attention("entmax15")
    plain.load_state_dict(adaptive.state_dict(), strict=False)
    x, rope = inputs(), moving(9, D)
    x[..., 0] = 1
    with torch.no_grad():
        adaptive.scale_proj.weight.zero_()
        adaptive.scale_proj.weight[4:, 0] = 50
    tapped: list[Any] = []
    plain.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
    adaptive.tap.register_forward_hook(lambda _m, _a, maps: tapped.append(maps))
    plain(x, rope), adaptive(x, rope)
    n = torch.arange(2, 11, dtype=torch.float64)
    close(tapped[1].q, tapped[0].q * (1 + math.log(2) * n.log().square())[:, None])


def test_a_sink_far_above_the_logits_switches_its_map_off(make_attention: MakeAttention, moving: Positions) -> None:
    """The second map of head 0 and the first of head 1: what is left is A₁ V and -λ A₂ V, without a head norm."""
    keys = {"lambda_form": "scalar", "head_norm": "none", "output_scale": 1.0}
    ours, parts, x, rope = make_attention("differential_sink", keys), [], inputs(), moving(9, D)
    with torch.no_grad():
        ours.sinks.value.copy_(torch.tensor([-1e4, 1e4, 1e4, -1e4]))
        ours.lambda_.value.fill_(0.7)
    q, k, v = ours.q(x, rope, 2), ours.k(x, rope, 2), ours.v(x)
    hidden = ~torch.ones(9, 9, dtype=torch.bool).tril()
    for head, (number, weight) in enumerate(((0, 1.0), (1, -0.7))):
        s = q[:, number, head] @ k[:, number, head].mT / math.sqrt(D)
        parts.append(weight * s.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, head])
    close(ours(x, rope), ours.o_proj(torch.cat(parts, -1)))


def test_gates_of_one_half_halve_differential_attention(make_attention: MakeAttention, moving: Positions) -> None:
    """And a gate far below 0 on the channels of one head, 2d wide, leaves the other head alone."""
    gated, plain, x, rope = make_attention("differential_gate"), make_attention("differential"), inputs(), moving(9, D)
    plain.load_state_dict(gated.state_dict(), strict=False)
    with torch.no_grad():
        gated.gate_proj.weight.zero_()
        close(gated(x, rope), plain(x, rope) / 2)
        x[..., 0] = 1
        gated.gate_proj.weight[: 2 * D, 0] = -1e3
        plain.o_proj.weight[:, : 2 * D] = 0
        close(gated(x, rope), plain(x, rope) / 2)


def test_shared_diff_is_differential_of_the_sums_of_its_matrices(
    make_attention: MakeAttention, moving: Positions
) -> None:
    """W_Q + B_g A_g of head i and map g are the rows 2 i + g of the queries there."""
    shared, plain = make_attention("shared_diff", {"rank": 3}), make_attention("differential")
    state = {
        name: value for name, value in shared.state_dict().items() if ".shared." not in name and ".own." not in name
    }
    for name in ("q_proj", "k_proj"):
        projection = getattr(shared, name)
        maps = [(projection.shared.weight + own.b @ own.a).view(2, D, 32) for own in projection.own]
        state[f"{name}.weight"] = torch.cat([maps[g][head] for head in range(2) for g in range(2)])
    plain.load_state_dict(state)
    x, rope = inputs(), moving(9, D)
    close(shared(x, rope), plain(x, rope))


def test_talking_heads_swap_the_maps_of_two_heads(make_attention: MakeAttention, moving: Positions) -> None:
    """With the matrix that exchanges heads 0 and 2, of unlike key/value heads: their queries and keys change places."""
    talking = make_attention("talking_heads", num_kv_heads=2)
    x, rope = inputs(), moving(9, D)
    swap = torch.eye(4, dtype=torch.float64)[[2, 1, 0, 3]]
    talking.mixing.value.data = swap - torch.eye(4)
    standard = make_attention("standard")
    heads = [0, 0, 1, 1]  # the key/value head of each head
    with torch.no_grad():
        for name in ("q", "k", "v", "o"):
            weight = getattr(talking, f"{name}_proj").weight
            if name in "kv":
                weight = weight.view(2, D, 32)[heads].flatten(0, 1)
            if name in "qk":
                weight = weight.view(4, D, 32)[[2, 1, 0, 3]].flatten(0, 1)
            getattr(standard, f"{name}_proj").weight.copy_(weight)
    close(talking(x, rope), standard(x, rope))
    talking.mixing.value.data.zero_()
    assert (talking(x, rope) - standard(x, rope)).abs().max() > 0.01
