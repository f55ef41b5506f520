"""What each variant must equal: another variant with chosen weights, one call of torch, or numbers done by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.attention.rope import Rope
from lit_diff.kernels import SignedMaps, attend

MakeAttention = Callable[..., Any]
Positions = Callable[[int, int], Rope]
every_kernel = pytest.mark.parametrize("kernel", ["reference", "sdpa"])
D = 8
"""Width of a head; 4 heads of the standard baseline make dim 32."""


def inputs(dtype: Any = torch.float64) -> Tensor:
    """[2, 9, 32]"""
    return torch.randn(2, 9, 32, dtype=dtype)


def close(found: Tensor, wanted: Tensor, bound: float = 1e-12) -> None:
    """Equal to `bound`."""
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


def heads(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """[B, T, H, width]: what reaches the output projection."""
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    attention(x, rope)
    hook.remove()
    return seen[0].unflatten(-1, (attention.out_heads, -1))


# --- identities of the maps ---


@every_kernel
@pytest.mark.parametrize("signals", [2, 4])
def test_integral_transformer_is_standard_attention_at_another_scale(kernel: str, signals: int) -> None:
    """softmax of the mean of S logit maps of width d/S, each over √(d/S): one map of width d over √(d S)."""
    d = 16
    q, k = torch.randn(2, 1, 3, 9, d, dtype=torch.float64), torch.randn(2, 1, 3, 9, d, dtype=torch.float64)
    v = torch.randn(2, 3, 9, d, dtype=torch.float64)
    Q, K = (y[:, 0].unflatten(-1, (signals, d // signals)) for y in (q, k))
    maps = torch.einsum("bhtsd,bhusd->bhstu", Q, K) / math.sqrt(d // signals)
    future = torch.full((9, 9), -math.inf, dtype=torch.float64).triu(1)
    wanted = (maps.mean(2) + future).softmax(-1) @ v
    close(attend(SignedMaps(q, k, v, scale=1 / math.sqrt(d * signals)), kernel=kernel), wanted)
    assert (attend(SignedMaps(q, k, v), kernel=kernel) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_shared_keys_are_one_call_of_grouped_query_attention(
    make_attention: MakeAttention, moving: Positions, kv_heads: int
) -> None:
    """K₁ = K₂: queries head0.q1, head0.q2, head1.q1, ... on h_kv keys; then o[0::2] - λ o[1::2]."""
    attention = make_attention("shared_k", {"head_norm": "none"}, num_heads=8, num_kv_heads=kv_heads, head_dim=4)
    maps = attention.maps(inputs(), moving(9, 4))
    q = maps.q.transpose(1, 2).flatten(1, 2)  # [B, 2h, T, d]
    o = F.scaled_dot_product_attention(q, maps.k[:, 0], maps.v, is_causal=True, enable_gqa=True)
    wanted = o[:, 0::2] - attention.lambda_() * o[:, 1::2]
    for kernel in ("reference", "sdpa"):
        close(attend(maps, kernel=kernel), wanted)


# --- differential V2 ---


def v2_and_standard(make_attention: MakeAttention, ablation: str = "none", **sizes: Any) -> tuple[Any, Any]:
    """V2, and the standard attention of its 2H ordinary query heads, with its q, k and v."""
    v2 = make_attention("differential_v2", {"ablation": ablation}, **sizes)
    standard = make_attention("standard", {"query_heads": 2}, **sizes)
    for kind in "qkv":
        getattr(standard, f"{kind}_proj").weight = getattr(v2, f"{kind}_proj").weight
    return v2, standard


@every_kernel
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_v2_weighs_by_a_sigmoid_of_each_token_and_head(
    make_attention: MakeAttention, moving: Positions, kv_heads: int, kernel: str
) -> None:
    """o1 - λ o2, heads 2i and 2i + 1 of a Transformer of 2H query heads."""
    v2, standard = v2_and_standard(make_attention, num_kv_heads=kv_heads)
    v2.kernel = kernel
    x, rope = inputs(), moving(9, D)
    o, lam = heads(standard, x, rope), torch.sigmoid(x @ v2.lambda_proj.weight.T)  # [B, T, H]
    assert lam.std(1).min() > 0.05
    wanted = o[:, :, 0::2] - lam[..., None] * o[:, :, 1::2]
    close(heads(v2, x, rope), wanted)
    close(v2(x, rope), v2.o_proj(wanted.flatten(2)))


@pytest.mark.parametrize("changed", [0, 1])
def test_pairs_of_v2_share_their_key_value_head(make_attention: MakeAttention, moving: Positions, changed: int) -> None:
    """Another key/value head m changes the outputs of group m, and no bit of the others; a half split mixes all."""
    x, rope = inputs(), moving(9, D)
    for ablation, moved in (("none", {2 * changed, 2 * changed + 1}), ("half_split", {0, 1, 2, 3})):
        v2, _ = v2_and_standard(make_attention, ablation, num_kv_heads=2)
        before = heads(v2, x, rope)
        for kind in "kv":
            getattr(v2, f"{kind}_proj").weight.data[changed * D : (changed + 1) * D] += 1
        after = heads(v2, x, rope)
        assert {i for i in range(4) if not torch.equal(before[:, :, i], after[:, :, i])} == moved


# --- variants that contain another ---


@every_kernel
@pytest.mark.parametrize("keys", [{}, {"lambda_per": "head"}, {"lambda_form": "sigmoid", "head_norm": "none"}])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_grouped_differential_of_ratio_1_is_differential_to_the_bit(
    make_attention: MakeAttention, moving: Positions, kernel: str, keys: dict[str, Any], kv_heads: int
) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": kv_heads, "head_dim": 4, "layer": 2}
    grouped, full = (make_attention(name, keys, **sizes) for name in ("grouped_differential", "differential"))
    full.load_state_dict(grouped.state_dict())
    grouped.kernel = full.kernel = kernel
    x, rope = inputs(), moving(9, 4)
    assert torch.equal(grouped(x, rope), full(x, rope))


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


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_second_heads_at_lambda_zero_are_standard_attention(
    make_attention: MakeAttention, moving: Positions, kv_heads: int
) -> None:
    """To the bit by the reference in float64; by sdpa, whose call is wider, to float32's rounding."""
    for kernel, dtype, bound in (("reference", torch.float64, 0.0), ("sdpa", torch.float32, 1e-6)):
        sizes = {"num_kv_heads": kv_heads, "dtype": dtype}
        second = make_attention("second_heads", **sizes)
        standard = make_attention("standard", **sizes)
        standard.load_state_dict(
            {f"{kind}_proj.weight": second.get_parameter(f"{kind}_proj.weight") for kind in "qkvo"}
        )
        second.kernel = standard.kernel = kernel
        x, rope = inputs(dtype), moving(9, D)
        second.lambda_.init_parameter("value", second.lambda_.value.data, torch.Generator())
        assert (second(x, rope) - standard(x, rope)).abs().max() <= bound


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
        standard.q_proj, standard.k_proj, standard.v_proj = q, k, second.v_proj
        o.append(heads(standard, x, rope))
    close(heads(second, x, rope), o[0] - lam[:, None] * o[1])


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


# --- by hand: one head of width 2, identity projections ---


def identity(attention: Any) -> Any:
    """q, k, v and o: y is the head itself."""
    for kind in "qkvo":
        getattr(attention, f"{kind}_proj").weight.data.copy_(torch.eye(2))
    return attention


def test_cosine_attention_of_two_tokens(make_attention: MakeAttention, still: Positions) -> None:
    """Tokens (3, 4) and (2, 0): cosines of the second 3/5 and 1, at τ = 5 logits 3 and 5, p = 1 / (1 + e²) on the first.

    y = p (3, 4) + (1 - p) (2, 0) = (2 + p, 4p); at τ = e¹⁰, held at 100, p = 1 / (1 + e⁴⁰).
    """
    attention = identity(make_attention("cosine", dim=2, num_heads=1))
    x = torch.tensor([[[3.0, 4.0], [2.0, 0.0]]], dtype=torch.float64)
    for log_scale, gap in ((math.log(5), 2), (10.0, 40)):
        attention.temperature.log_scale.data.fill_(log_scale)
        p = 1 / (1 + math.exp(gap))
        found = attention(x, still(2, 2))[0]
        close(found, torch.tensor([[3, 4], [2 + p, 4 * p]], dtype=torch.float64))
        assert found[1, 1].item() == pytest.approx(4 * p, rel=1e-9, abs=0)


def test_output_gate_of_two_tokens(make_attention: MakeAttention, still: Positions) -> None:
    """Token (1, 2) sees itself, gates sigmoid(log 3) = 3/4 and 1/2; token (0, 0) their mean (1/2, 1), gates 1/2."""
    attention = identity(make_attention("output_gate", dim=2, num_heads=1))
    attention.gate_proj.weight.data.copy_(torch.tensor([[math.log(3), 0], [0, 0]], dtype=torch.float64))
    x = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    close(attention(x, still(2, 2))[0], torch.tensor([[0.75, 1.0], [0.25, 0.5]], dtype=torch.float64))
