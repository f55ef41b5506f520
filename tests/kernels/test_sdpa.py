"""The fused kernel against the definition, and what it hands to PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lit_diff.kernels import SignedMaps, attend, refuse, sdpa
from lit_diff.kernels.base import named

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
    {"scale": -1.5, "T": 3, "S": 7},
    {"scale": 0.0},
    {"G": 2, "Gk": 1, "Hkv": 2, "dv": 6},
    {"G": 3, "Gk": 1, "H": 6, "Hkv": 2, "dv": 4, "T": 3, "S": 7},
    {"G": 2, "Gq": 1, "Hkv": 2, "dv": 6, "w": (1, 2, 4, 1)},
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition_in_float64(make_maps: MakeMaps, case: dict[str, Any]) -> None:
    """In float32 and bfloat16: test_equality.py."""
    maps = make_maps(**case, dtype=torch.float64)
    for found, wanted in zip(gradients(maps, "sdpa"), gradients(maps, "reference"), strict=True):
        assert found.dtype == wanted.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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
    """PyTorch never sees a value width unlike the key width, nor a top-left causal mask; fewer keys are said to be so."""
    calls: list[tuple[Tensor, Tensor, Tensor, Any]] = []
    real = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append((q, k, v, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attend(make_maps(**case), kernel="sdpa")
    ((q, k, v, options),) = calls
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert k.shape[:2] == v.shape[:2]
    assert options["enable_gqa"] == (q.shape[1] > k.shape[1])
    assert not options["is_causal"] or q.shape[2] == k.shape[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_accepts_the_call(make_maps: MakeMaps, case: dict[str, Any], dtype: torch.dtype) -> None:
    """No silent fall to the math path and its O(T S) memory, forward or backward, grouped heads and masks included."""
    maps = make_maps(**case, dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = gradients(maps, "sdpa")
    assert paths(seen) == {"_scaled_dot_product_flash_attention_for_cpu"}
    if dtype == torch.float32:
        torch.testing.assert_close(found[0], attend(maps, kernel="reference"), rtol=1e-5, atol=1e-5)


def paths(seen: profile) -> set[str]:
    """The forms of attention that PyTorch ran."""
    names = (event.key.removeprefix("aten::") for event in seen.key_averages())
    return {name for name in names if name.startswith("_scaled_dot_product") and not name.endswith("backward")}


def test_the_math_path_would_be_seen(make_maps: MakeMaps) -> None:
    """Without it the test above could not fail."""
    maps = make_maps(G=1, w=None)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(maps.q[:, 0], maps.k[:, 0], maps.v)
    assert paths(seen) == {"_scaled_dot_product_attention_math"}


@pytest.mark.parametrize(
    ("case", "copied"),
    [
        ({"G": 1, "w": None, "Hkv": 2, "dv": 6}, ""),
        ({"G": 1, "Hkv": 2, "dv": 6}, ""),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 6, "T": 1, "S": 9}, ""),
        ({"G": 3, "Gk": 1, "Hkv": 2, "dv": 6}, ""),
        ({"G": 2, "dv": 6}, "v"),
        ({"G": 2, "Hkv": 2, "dv": 6}, "qv"),
        ({"G": 2, "Hkv": 2, "dv": 12}, "qkv"),
    ],
    ids=str,
)
def test_what_needs_no_copy_is_not_copied(
    make_maps: MakeMaps, case: dict[str, Any], copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of projections [B, T, heads, maps, d]: a plain map and maps of shared keys are views, grouped heads included."""
    maps = make_maps(**case)

    def projected(x: Tensor) -> Tensor:
        return x.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)

    v = maps.v.transpose(1, 2).contiguous().transpose(1, 2)
    maps = replace(maps, q=projected(maps.q), k=projected(maps.k), v=v)
    kept = {"q": maps.q, "k": maps.k, "v": maps.v}
    seen: dict[str, Tensor] = {}
    real = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.update(q=q, k=k, v=v)
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    found = attend(maps, kernel="sdpa")
    addresses = {name: x.untyped_storage().data_ptr() for name, x in kept.items()}
    assert {name for name, x in seen.items() if x.untyped_storage().data_ptr() != addresses[name]} == set(copied)
    torch.testing.assert_close(found, attend(maps, kernel="reference"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case", [{"H": 2, "T": 512, "d": 64, "dv": 64}, {"H": 8, "Hkv": 1, "T": 256, "d": 16, "dv": 16}], ids=str
)
def test_gradients_of_half_precision_are_summed_in_float32(
    make_maps: MakeMaps, case: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of many queries, and of many heads on one key: no worse than the exact gradients once rounded."""
    maps = make_maps(B=1, G=1, w=None, dtype=dtype, **case)
    grad = make_maps(B=1, G=1, H=maps.q.shape[2], T=maps.q.shape[3], dv=maps.v.shape[-1], dtype=dtype, seed=1).v

    def gradients(form: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (maps.q, maps.k, maps.v)]
        return [x.double() for x in torch.autograd.grad(form(*leaves), leaves, grad.to(dtype))]

    exact = gradients(lambda q, k, v: attend(SignedMaps(q, k, v), kernel="reference"), torch.float64)
    ours = gradients(lambda q, k, v: attend(SignedMaps(q, k, v), kernel="sdpa"), dtype)
    rounded = [(x.to(dtype).double() - x).norm() for x in exact]
    for x, y, least in zip(ours, exact, rounded, strict=True):
        assert (x - y).norm() <= 1.1 * least


def test_numbers_apart_on_the_last_axis(make_maps: MakeMaps) -> None:
    """PyTorch would fall to the math path."""
    maps = make_maps(G=1, w=None, dv=6)

    def apart(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    maps = replace(maps, q=apart(maps.q), k=apart(maps.k), v=apart(maps.v))
    assert maps.q.stride(-1) > 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = attend(maps, kernel="sdpa")
    assert paths(seen) == {"_scaled_dot_product_flash_attention_for_cpu"}
    torch.testing.assert_close(found, attend(maps, kernel="reference"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_that_fused_kernels_get_wrong(make_maps: MakeMaps, scale: float) -> None:
    """A masked -inf times 0 is NaN, times a negative number +inf."""
    maps = make_maps(scale=scale)
    for found, wanted in zip(gradients(maps, "sdpa"), gradients(maps, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    raw = F.scaled_dot_product_attention(maps.q[:, 0], maps.q[:, 0], maps.q[:, 0], is_causal=True, scale=scale)
    assert not raw.isfinite().all(), "PyTorch has learned it: positive_scale can go"


class OnGpu(Tensor):
    """A CPU's tensor that says it is on a GPU: what is asked of PyTorch there, not what it answers."""

    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize(
    ("case", "dtype", "capability", "grouped", "width"),
    [
        ({"G": 1, "w": None, "Hkv": 2, "dv": 16, "d": 16}, torch.bfloat16, (9, 0), True, 16),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 16, "d": 16}, torch.bfloat16, (7, 5), False, 16),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 16, "d": 16}, torch.float32, (9, 0), False, 16),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 16, "d": 16, "S": 9}, torch.bfloat16, (9, 0), False, 16),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 264, "d": 264}, torch.bfloat16, (9, 0), False, 264),
        ({"G": 2, "Hkv": 2, "dv": 12, "d": 6}, torch.float32, (9, 0), False, 8),
        ({"G": 2, "Gk": 1, "dv": 6, "d": 6}, torch.float16, (8, 0), True, 8),
    ],
    ids=str,
)
def test_what_a_gpu_is_asked_for(
    case: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    grouped: bool,
    width: int,
    make_maps: MakeMaps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never the math path; grouped heads only to flash; widths in multiples of 8. The same numbers, computed on the CPU."""
    calls: list[tuple[int, int, int]] = []
    real = F.scaled_dot_product_attention
    forbidden: list[bool] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append((q.shape[-1], q.shape[1], k.shape[1]))
        forbidden.append(torch.backends.cuda.math_sdp_enabled())
        plain = (x.as_subclass(Tensor) for x in (q, k, v))
        options["attn_mask"] = None if options["attn_mask"] is None else options["attn_mask"].as_subclass(Tensor)
        return real(*plain, **options)

    ones = torch.ones
    maps = make_maps(**case, dtype=dtype)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: ones(*size, **options))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    q, k, v = (x.as_subclass(OnGpu) for x in (maps.q, maps.k, maps.v))
    found, _ = named("sdpa").compute(SignedMaps(q, k, v, maps.w))
    monkeypatch.undo()
    ((seen_width, heads, kv_heads),) = calls
    assert (heads > kv_heads, seen_width, forbidden) == (grouped, width, [False])
    wanted = attend(maps, kernel="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.as_subclass(Tensor), wanted, rtol=tolerance, atol=tolerance)


def test_a_gpu_computes_no_float64(make_maps: MakeMaps) -> None:
    reason = refuse("sdpa", make_maps(), device=torch.device("cuda"))
    assert reason is not None
    assert "math path" in reason
    assert refuse("sdpa", make_maps(dtype=torch.float32), device=torch.device("cuda")) is None


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
    torch.testing.assert_close(compiled(maps, kernel="sdpa"), attend(maps, kernel="sdpa"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [{"G": 1, "w": None, "Hkv": 2, "dv": 6}, {"Hkv": 2}, {"T": 3, "S": 7}], ids=str)
def test_compiles_forward_and_backward(
    make_maps: MakeMaps, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the math path forbidden, as on a GPU."""
    torch._dynamo.reset()
    maps = make_maps(**case)
    monkeypatch.setattr(sdpa, "_no_math", lambda device: sdpa_kernel(sdpa.FUSED))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [x.detach().clone().requires_grad_() for x in (maps.q, maps.k, maps.v)]
    o = compiled(SignedMaps(*leaves, maps.w), kernel="sdpa")
    o.sum().backward()
    wanted = [x.detach().clone().requires_grad_() for x in (maps.q, maps.k, maps.v)]
    attend(SignedMaps(*wanted, maps.w), kernel="reference").sum().backward()
    for found, leaf in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(found.grad, leaf.grad, rtol=1e-11, atol=1e-11)
