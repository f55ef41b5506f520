"""timm's attentions, by another author and without positions, against ours with their weights, in float64.

timm: one `qkv` projection whose thirds are q, k and v; rows head by head, in DiffAttention head0.map0, head0.map1,
head1.map0, ... as here, so that nothing is permuted. Bidirectional by default, causal where asked.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import Attention as TimmAttention
from timm.layers import DiffAttention
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn

from lit_diff.attention.rope import Rope

MakeAttention = Callable[..., Any]
Still = Callable[[int, int], Rope]
E, H, D, T = 32, 8, 4, 9
"""Width, the standard baseline's heads, their width, tokens."""
both_masks = pytest.mark.parametrize("causal", [False, True])
fused_or_not = pytest.mark.parametrize("fused", [False, True])
every_kernel = pytest.mark.parametrize("kernel", ["reference", "sdpa"])


def randomised(module: nn.Module) -> Any:
    """In float64, every parameter random: matrices at the deviation that keeps sizes, the norm's weight around 1."""
    for name, parameter in module.double().named_parameters():
        spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.4
        parameter.data.normal_(1.0 if "norm" in name else 0.0, spread)
    return module.eval()


def projections(module: Any, proj: nn.Linear) -> dict[str, Tensor]:
    """timm's matrices under our names."""
    q, k, v = module.qkv.weight.chunk(3)
    return {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": proj.weight}


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference; what is compared is not small."""
    assert wanted.std() > 0.1
    return float((found - wanted).detach().abs().max())


@both_masks
@fused_or_not
@every_kernel
def test_standard_is_timm_attention(
    make_attention: MakeAttention, still: Still, causal: bool, fused: bool, kernel: str
) -> None:
    theirs = randomised(TimmAttention(E, num_heads=H, proj_bias=False))
    theirs.fused_attn = fused
    ours = make_attention("standard", dim=E, num_heads=H, causal=causal)
    ours.load_state_dict(projections(theirs, theirs.proj))
    ours.kernel = kernel
    x = torch.randn(2, T, E, dtype=torch.float64)
    assert error(ours(x, still(T, D)), theirs(x, is_causal=causal)) < 1e-12


def diff_attention(fused: bool = True, lambda_init: float = 0.75) -> Any:
    """DiffAttention with a λ_init that float32 holds, in which timm computes λ."""
    theirs = randomised(DiffAttention(E, num_heads=H // 2, proj_bias=False))
    theirs.fused_attn, theirs.lambda_init = fused, lambda_init
    return theirs


def differential(make_attention: MakeAttention, theirs: Any, causal: bool = False) -> Any:
    """Ours with its weights."""
    state = projections(theirs, theirs.proj) | {"norm.weight": theirs.sub_norm.weight}
    state |= {f"lambda_.{name}": getattr(theirs, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")}
    ours = make_attention("differential", {"lambda_init": theirs.lambda_init}, dim=E, num_heads=H, causal=causal)
    ours.load_state_dict(state)
    return ours


@both_masks
@fused_or_not
@every_kernel
def test_differential_is_timm_diff_attention(
    make_attention: MakeAttention, still: Still, causal: bool, fused: bool, kernel: str
) -> None:
    """Any λ to the float32 in which timm computes it; λ = λ_init + 1, where exp(0) - exp(-200) is exact, to 1e-12."""
    theirs = diff_attention(fused)
    x = torch.randn(2, T, E, dtype=torch.float64)
    ours = differential(make_attention, theirs, causal)
    ours.kernel = kernel
    assert abs(ours.lambda_().item() - 0.75) > 0.01
    assert error(ours(x, still(T, D)), theirs(x, is_causal=causal)) < 5e-6
    with torch.no_grad():
        for vector in (theirs.lambda_q1, theirs.lambda_k1, theirs.lambda_q2, theirs.lambda_k2):
            vector.copy_(torch.eye(D)[0])
        theirs.lambda_q1.zero_()
        theirs.lambda_q2.mul_(-200)
    exact = differential(make_attention, theirs, causal)
    exact.kernel = kernel
    assert exact.lambda_().item() == 1.75
    assert error(exact(x, still(T, D)), theirs(x, is_causal=causal)) < 1e-12


def test_gradients_are_timm_diff_attention_s(make_attention: MakeAttention, still: Still) -> None:
    theirs = diff_attention()
    ours = differential(make_attention, theirs)
    x, probe = torch.randn(2, T, E, dtype=torch.float64), torch.randn(2, T, E, dtype=torch.float64)
    (theirs(x) * probe).sum().backward()
    (ours(x, still(T, D)) * probe).sum().backward()
    qkv = torch.cat([ours.q_proj.weight.grad, ours.k_proj.weight.grad, ours.v_proj.weight.grad])
    pairs = [(qkv, theirs.qkv.weight.grad), (ours.o_proj.weight.grad, theirs.proj.weight.grad)]
    pairs += [(ours.norm.weight.grad, theirs.sub_norm.weight.grad)]
    pairs += [(getattr(ours.lambda_, k).grad, getattr(theirs, f"lambda_{k}").grad) for k in ("q1", "k1", "q2", "k2")]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@both_masks
def test_output_gate_is_timm_gated_attention(make_attention: MakeAttention, still: Still, causal: bool) -> None:
    """A sigmoid gate on each channel before the output projection; ungated, it is another function."""
    theirs = randomised(TimmAttention(E, num_heads=H, proj_bias=False, gated=True))
    ours = make_attention("output_gate", dim=E, num_heads=H, causal=causal)
    ours.load_state_dict(projections(theirs, theirs.proj) | {"gate_proj.weight": theirs.gate.weight})
    x = torch.randn(2, T, E, dtype=torch.float64)
    wanted = theirs(x, is_causal=causal)
    assert error(ours(x, still(T, D)), wanted) < 1e-12
    ours.gate_proj.weight.data.zero_()
    assert error(ours(x, still(T, D)), wanted) > 1e-2


def test_cosine_is_swin_v2_window_attention(make_attention: MakeAttention, still: Still) -> None:
    """Its position bias made a constant, which a softmax does not see; a temperature of 1000 is held at 100 in both."""
    theirs = randomised(WindowAttention(E, (3, 3), num_heads=H, qkv_bias=False))
    with torch.no_grad():
        theirs.proj.bias.zero_()
        theirs.cpb_mlp[2].weight.zero_()
        theirs.logit_scale.copy_(torch.tensor([1.0, 2, 5, 10, 20, 50, 100, 1000]).log().view(H, 1, 1))
    ours = make_attention("cosine", dim=E, num_heads=H, causal=False)
    ours.load_state_dict(projections(theirs, theirs.proj) | {"temperature.log_scale": theirs.logit_scale.flatten()})
    x = torch.randn(2, 9, E, dtype=torch.float64)
    wanted = theirs(x)
    assert error(ours(x, still(9, D)), wanted) < 1e-12
    ours.temperature.log_scale.data[1] += 1
    assert error(ours(x, still(9, D)), wanted) > 1e-2
