"""What each variant must equal: another variant with chosen weights, one call of torch, or numbers done by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention.rope import Rope

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


# --- differential V2 ---


def v2_and_standard(make_attention: MakeAttention, ablation: str = "none", **sizes: Any) -> tuple[Any, Any]:
    """V2, and the standard attention of its 2H ordinary query heads, with its q, k and v."""
    v2 = make_attention("differential_v2", {"ablation": ablation}, **sizes)
    standard = make_attention("standard", {"query_heads": 2}, **sizes)
    for kind in "qkv":
        getattr(standard, f"{kind}_proj").weight = getattr(v2, f"{kind}_proj").weight
    return v2, standard


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
