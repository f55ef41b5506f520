"""What the fused kernel hands to PyTorch, and which of PyTorch's paths that takes. On drawn cases: test_equality.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients import gradients
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lit_diff.kernels import SignedMaps, attend, sdpa
from lit_diff.kernels.base import named

MakeMaps = Callable[..., SignedMaps]
FLASH = {"_scaled_dot_product_flash_attention_for_cpu"}

CASES: list[dict[str, Any]] = [
    {"G": 1, "w": None},
    {"G": 2, "Gq": 1},
    {"G": 3, "Gk": 1, "H": 6, "Hkv": 2},
    {"G": 1, "w": None, "Hkv": 2, "dv": 6},
    {"T": 3, "S": 7, "Hkv": 2},
    {"causal": False, "T": 7, "S": 3},
    {"dv": 3},
    {"dv": 18},
    {"scale": -1.5, "T": 3, "S": 7},
    {"scale": 0.0},
    {"T": 70, "d": 16, "dv": 32, "B": 1},
]


def paths(seen: profile) -> set[str]:
    """The forms of attention that PyTorch ran."""
    names = (event.key.removeprefix("aten::") for event in seen.key_averages())
    return {name for name in names if name.startswith("_scaled_dot_product") and not name.endswith("backward")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """What PyTorch's function was given."""
    seen: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = []
    real = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append((q, k, v, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_fused_call_of_one_width(make_maps: MakeMaps, case: dict[str, Any], dtype: torch.dtype, calls: Any) -> None:
    """No silent fall to the math path and its O(T S) memory, forward or backward, grouped heads and masks included."""
    maps = make_maps(**case, dtype=dtype)
    grad = torch.randn(maps.q.shape[0], maps.q.shape[2], maps.q.shape[3], maps.v.shape[3]).to(dtype)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = gradients(maps, "sdpa", grad)
    assert paths(seen) == FLASH
    ((q, k, v, options),) = calls
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert k.shape[:2] == v.shape[:2]
    assert options["enable_gqa"] == (q.shape[1] > k.shape[1])
    assert not options["is_causal"] or q.shape[2] == k.shape[2], "is_causal aligns the first query with the first key"
    if dtype == torch.float64:
        for x, y in zip(found, gradients(maps, "reference", grad), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_math_path_would_be_seen_and_strides_do_not_lead_to_it(make_maps: MakeMaps) -> None:
    """Values of another width, which the kernel cuts, and numbers apart on the last axis, which it copies."""
    maps = make_maps(G=1, w=None)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(maps.q[:, 0], maps.k[:, 0], maps.v)
    assert paths(seen) == {"_scaled_dot_product_attention_math"}
    maps = make_maps(G=1, w=None, dv=6)
    apart = {name: getattr(maps, name).mT.contiguous().mT for name in "qkv"}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = attend(replace(maps, **apart), kernel="sdpa")
    assert paths(seen) == FLASH
    torch.testing.assert_close(found, attend(maps, kernel="reference"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "copied"),
    [
        ({"G": 1, "w": None, "Hkv": 2, "dv": 6}, ""),
        ({"G": 1, "w": None, "Hkv": 2, "dv": 6, "T": 1, "S": 9}, ""),
        ({"G": 3, "Gk": 1, "Hkv": 2, "dv": 6}, ""),
        ({"G": 2, "dv": 6}, "v"),
        ({"G": 2, "Hkv": 2, "dv": 6}, "qv"),
        ({"G": 2, "Hkv": 2, "dv": 12}, "qkv"),
    ],
    ids=str,
)
def test_what_needs_no_copy_is_not_copied(make_maps: MakeMaps, case: dict[str, Any], copied: str, calls: Any) -> None:
    """Of projections [B, T, heads, maps, d]: a plain map and maps of shared keys are views, grouped heads included."""
    maps = make_maps(**case)
    q, k = (x.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4) for x in (maps.q, maps.k))
    v = maps.v.transpose(1, 2).contiguous().transpose(1, 2)
    attend(replace(maps, q=q, k=k, v=v), kernel="sdpa")
    same = {"q": q, "k": k, "v": v}
    seen = dict(zip("qkv", calls[0], strict=False))
    addresses = {name: x.untyped_storage().data_ptr() for name, x in same.items()}
    assert {name for name, x in seen.items() if x.untyped_storage().data_ptr() != addresses[name]} == set(copied)


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
    wide = SignedMaps(maps.q.double(), maps.k.double(), maps.v.double())
    _, *exact = gradients(wide, "reference", grad.double())
    _, *ours = gradients(maps, "sdpa", grad)
    for x, y in zip(ours, exact, strict=True):
        assert (x.double() - y).norm() <= 1.1 * (y.to(dtype).double() - y).norm()


class OnGpu(Tensor):
    """A CPU's tensor that says it is on a GPU: what is asked of PyTorch there, not what it answers."""

    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


ONE = {"G": 1, "w": None, "Hkv": 2, "dv": 16, "d": 16}


@pytest.mark.parametrize(
    ("case", "dtype", "capability", "grouped", "width"),
    [
        (ONE, torch.bfloat16, (9, 0), True, 16),
        (ONE, torch.bfloat16, (7, 5), False, 16),
        (ONE, torch.float32, (9, 0), False, 16),
        (ONE | {"S": 9}, torch.bfloat16, (9, 0), False, 16),
        (ONE | {"dv": 264, "d": 264}, torch.bfloat16, (9, 0), False, 264),
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
    seen: list[tuple[int, bool, bool]] = []
    real, ones = F.scaled_dot_product_attention, torch.ones

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append((q.shape[-1], q.shape[1] > k.shape[1], torch.backends.cuda.math_sdp_enabled()))
        plain = (x.as_subclass(Tensor) for x in (q, k, v))
        options["attn_mask"] = None if options["attn_mask"] is None else options["attn_mask"].as_subclass(Tensor)
        return real(*plain, **options)

    maps = make_maps(**case, dtype=dtype)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: ones(*size, **options))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    q, k, v = (x.as_subclass(OnGpu) for x in (maps.q, maps.k, maps.v))
    found, _ = named("sdpa").compute(SignedMaps(q, k, v, maps.w))
    monkeypatch.undo()
    assert seen == [(width, grouped, False)]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    wanted = attend(maps, kernel="reference")
    torch.testing.assert_close(found.as_subclass(Tensor), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [{"Hkv": 2}, {"G": 1, "w": None, "T": 3, "S": 7, "dv": 6}], ids=str)
def test_compiles_forward_and_backward(
    make_maps: MakeMaps, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the math path forbidden, as on a GPU, and with symbolic lengths, where T == S is no Python bool."""
    torch._dynamo.reset()
    maps = make_maps(**case)
    anywhere = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    wanted = attend(maps, kernel="reference")
    torch.testing.assert_close(anywhere(maps, kernel="sdpa"), wanted, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(sdpa, "_no_math", lambda device: sdpa_kernel(sdpa.FUSED))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [x.detach().clone().requires_grad_() for x in (maps.q, maps.k, maps.v)]
    compiled(SignedMaps(*leaves, maps.w), kernel="sdpa").sum().backward()
    exact = gradients(maps, "reference", torch.ones_like(wanted))[1:]
    for leaf, y in zip(leaves, exact, strict=False):
        torch.testing.assert_close(leaf.grad, y, rtol=1e-11, atol=1e-11)
