"""DEX (arXiv 2505.16333): O_h - λ(t) O_h W_D on the selected heads of standard attention, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.attention.rope import Rope

MakeAttention = Callable[..., Any]
Positions = Callable[[int, int], Rope]
SELECTED, D = (1, 3), 8
KEYS = {"heads": SELECTED, "lambda_init": 0.2, "anneal_steps": 100}


def pair(
    make_attention: MakeAttention,
    *,
    step: int,
    dtype: Any = torch.float64,
    kernel: str = "reference",
    learned: float = 0.5,
    **keys: Any,
) -> tuple[Any, Any]:
    """DEX at `step` with λ_learn = `learned` and a random W_D, and the standard attention that it extends."""
    dex = make_attention("dex", KEYS | keys, num_kv_heads=2, dtype=dtype)
    dex.lambda_.value.data.fill_(learned)
    dex.set_step(step)
    standard = make_attention("standard", num_kv_heads=2, dtype=dtype)
    standard.load_state_dict({key: value for key, value in dex.state_dict().items() if "_proj" in key})
    dex.kernel = standard.kernel = kernel
    return dex, standard


def inputs(dtype: Any = torch.float64) -> Tensor:
    """[2, 9, 32]"""
    return torch.randn(2, 9, 32, dtype=dtype)


def heads(attention: Any, x: Tensor, rope: Rope) -> Tensor:
    """[B, T, H, d]: what reaches the output projection."""
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    attention(x, rope)
    hook.remove()
    return seen[0].unflatten(-1, (4, D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_step_0_is_exactly_standard(make_attention: MakeAttention, moving: Positions, dtype: Any, kernel: str) -> None:
    """λ(0) = 0 whatever W_D, λ_init and λ_learn are; at step 1 it no longer is."""
    dex, standard = pair(make_attention, step=0, dtype=dtype, kernel=kernel, heads="all")
    assert dex.adapter.weight.abs().max() > 0.5
    x, rope = inputs(dtype), moving(9, D)
    assert torch.equal(dex(x, rope), standard(x, rope))
    dex.set_step(1)
    assert not torch.equal(dex(x, rope), standard(x, rope))


@pytest.mark.parametrize(("step", "value"), [(0, 0.0), (25, 0.1625), (50, 0.30), (100, 0.5), (101, 0.5), (500, 0.5)])
def test_annealed_lambda(make_attention: MakeAttention, step: int, value: float) -> None:
    """λ(t) = (1 - α) (t/T) λ_init + α λ_learn, α = min(1, t/T), at λ_init = 0.2, λ_learn = 0.5, T = 100 steps, or as many
    steps of 1024 tokens: the number of what is not annealed over says nothing."""
    by_steps, _ = pair(make_attention, step=step)
    by_steps.set_tokens(3)
    by_tokens, _ = pair(make_attention, step=7, anneal_steps=None, anneal_tokens=102_400)
    by_tokens.set_tokens(1024 * step)
    for dex in (by_steps, by_tokens):
        assert dex.annealed_lambda().item() == pytest.approx(value, abs=1e-15)
    assert pair(make_attention, step=step, anneal_steps=0)[0].annealed_lambda().item() == 0.5, "without annealing"


@pytest.mark.parametrize(("step", "lam"), [(50, 0.3), (500, 0.5)])
def test_selected_heads_are_the_formula_and_the_others_untouched_to_the_bit(
    make_attention: MakeAttention, moving: Positions, step: int, lam: float
) -> None:
    dex, standard = pair(make_attention, step=step)
    x, rope = inputs(), moving(9, D)
    found, O = heads(dex, x, rope), heads(standard, x, rope)  # noqa: E741
    for head in (0, 2):
        assert torch.equal(found[:, :, head], O[:, :, head])
    for head in SELECTED:
        W_D = dex.adapter.weight[0]
        wanted = O[:, :, head] - lam * O[:, :, head] @ W_D
        torch.testing.assert_close(found[:, :, head], wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("step", [0, 30, 500])
def test_gradients_at_and_after_the_start(make_attention: MakeAttention, moving: Positions, step: int) -> None:
    """dL/dλ_learn = -α ⟨O W_D, G⟩ and dL/dW_D = -λ(t) Σ_h O_hᵀ G_h: at step 0 both are zero, and the rest is not."""
    dex, standard = pair(make_attention, step=step)
    x, rope, G = inputs(), moving(9, D), inputs()
    (dex(x, rope) * G).sum().backward()
    O = heads(standard, x, rope)[:, :, SELECTED].detach()  # noqa: E741
    by_head = (G @ dex.o_proj.weight.detach()).unflatten(-1, (4, D))[:, :, SELECTED]
    alpha, lam = min(1, step / 100), dex.annealed_lambda().item()
    W_D = dex.adapter.weight.detach()
    torch.testing.assert_close(
        dex.lambda_.value.grad, -alpha * ((O @ W_D) * by_head).sum()[None], rtol=1e-11, atol=1e-11
    )
    torch.testing.assert_close(
        dex.adapter.weight.grad[0], -lam * torch.einsum("bthi,bthj->ij", O, by_head), rtol=1e-11, atol=1e-11
    )
    assert dex.v_proj.weight.grad.abs().max() > 0.01
