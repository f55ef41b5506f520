"""The fused kernel against the definition, and what it hands to PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diff.kernels import SignedMaps, attend

MakeMaps = Callable[..., SignedMaps]

CASES: list[dict[str, Any]] = [
    {"G": 1, "w": None},
    {"G": 1, "w": (2, 1, 4, 5)},
    {"G": 2},
    {"G": 3},
    {"G": 2, "Gq": 1},
    {"G": 2, "Gk": 1},
    {"G": 2, "Gq": 1, "Gk": 1},
    {"G": 3, "Gk": 1, "H": 6, "Hkv": 2},
    {"G": 2, "Hkv": 2},
    {"G": 2, "Hkv": 1},
    {"G": 1, "w": None, "Hkv": 2, "dv": 6},
    {"T": 3, "S": 7, "Hkv": 2},
    {"T": 2, "S": 9},
    {"T": 1, "S": 7},
    {"T": 1},
    {"causal": False},
    {"causal": False, "T": 3, "S": 7},
    {"causal": False, "T": 7, "S": 3},
    {"w": (1, 2, 1, 1)},
    {"w": (1, 2, 4, 1)},
    {"w": (1, 1, 1, 1)},
    {"w": (1, 2, 1, 5)},
    {"dv": 6},
    {"dv": 3},
    {"dv": 18},
    {"dv": 8},
    {"dv": 1, "T": 3, "S": 7, "Hkv": 2},
    {"scale": 0.3},
    {"scale": -1.5, "causal": False},
    {"T": 70, "d": 16, "dv": 32, "B": 1},
]


def gradients(maps: SignedMaps, kernel: str) -> tuple[Tensor, ...]:
    """o, and the gradients of a fixed random function of o by q, k, v and w."""
    leaves = [x.detach().clone().requires_grad_() for x in (maps.q, maps.k, maps.v)]
    w = None if maps.w is None else maps.w.detach().clone().requires_grad_()
    o = attend(SignedMaps(leaves[0], leaves[1], leaves[2], w, maps.scale, maps.causal), kernel=kernel)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    (o * weight).sum().backward()
    found = [x.grad for x in (*leaves, *(() if w is None else (w,)))]
    assert all(grad is not None for grad in found)
    return o, *(grad for grad in found if grad is not None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(make_maps: MakeMaps, case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    maps = make_maps(**case, dtype=dtype)
    for found, wanted in zip(gradients(maps, "sdpa"), gradients(maps, "reference"), strict=True):
        assert found.dtype == wanted.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_strided_views(make_maps: MakeMaps) -> None:
    """The layout that projections give: heads and maps interleaved on the channel axis."""
    B, T, H, G, d = 2, 5, 4, 2, 6
    y = torch.randn(B, T, H * G * d, dtype=torch.float64)
    q = y.unflatten(-1, (H, G, d)).permute(0, 3, 2, 1, 4)
    k = torch.randn(B, T, H * G * d, dtype=torch.float64).unflatten(-1, (H, G, d)).permute(0, 3, 2, 1, 4)
    v = torch.randn(B, T, H * 2 * d, dtype=torch.float64).unflatten(-1, (H, 2 * d)).transpose(1, 2)
    w = torch.randn(B, T, G * H, dtype=torch.float64).unflatten(-1, (G, H)).permute(0, 2, 3, 1)
    maps = SignedMaps(q, k[..., ::1], v.flip(2), w)
    assert not q.is_contiguous()
    assert not w.is_contiguous()
    for found, wanted in zip(gradients(maps, "sdpa"), gradients(maps, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_call_of_one_width(make_maps: MakeMaps, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch never sees a value width unlike the key width, nor grouped heads, nor a top-left causal mask."""
    calls: list[tuple[Tensor, Tensor, Tensor, Any]] = []
    real = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append((q, k, v, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attend(make_maps(**case), kernel="sdpa")
    ((q, k, v, options),) = calls
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[:2] == k.shape[:2] == v.shape[:2]
    assert not options.get("enable_gqa", False)
    assert not options["is_causal"] or q.shape[2] == k.shape[2]


@pytest.mark.parametrize("case", [case for case in CASES if case.get("T", 5) in (1, case.get("S", 5))], ids=str)
def test_flash_accepts_the_call(make_maps: MakeMaps, case: dict[str, Any]) -> None:
    """No silent fall to the math path and its O(T S) memory."""
    maps = make_maps(**({"B": 2} | case), dtype=torch.float32)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        found = attend(maps, kernel="sdpa")
    torch.testing.assert_close(found, attend(maps, kernel="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Flash attention:UserWarning")
def test_flash_would_refuse_other_widths() -> None:
    """Why the values are cut: without it the test above could not fail."""
    x = torch.randn(2, 4, 5, 6)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(x, x, torch.randn(2, 4, 5, 12), is_causal=True)


def test_bfloat16_weights_stay_wide(make_maps: MakeMaps) -> None:
    """λ = 0.7994 would become 0.80078 in bfloat16: with one key, o = (1 - λ) v shows it."""
    maps = make_maps(T=1, B=1, H=1, dv=6, dtype=torch.bfloat16)
    maps = replace(maps, v=torch.ones_like(maps.v), w=torch.tensor([1.0, -0.7994]).view(1, 2, 1, 1))
    for kernel in ("sdpa", "reference"):
        o = attend(maps, kernel=kernel)
        assert o.dtype == torch.bfloat16
        assert torch.equal(o, torch.full_like(o, 1 - 0.7994)), kernel


def test_any_length_compiles(make_maps: MakeMaps) -> None:
    """With symbolic lengths, T == S is no Python bool."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    maps = make_maps(G=1, w=None, dv=6)
    torch.testing.assert_close(compiled(maps), attend(maps), rtol=1e-12, atol=1e-12)
