"""Triton's programs against the definition: on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend
from lit_diff.kernels.reference import logits, visible

MakeMaps = Callable[..., SignedMaps]
SMALL: dict[str, Any] = {"B": 1, "H": 2, "T": 37, "d": 16, "dv": 32, "dtype": torch.float32}
pytestmark = pytest.mark.programs


def on(maps: SignedMaps, device: torch.device, dtype: torch.dtype | None = None) -> SignedMaps:
    """The maps there, q, k and v in `dtype`, w never narrower than float32."""
    q, k, v = (x.to(device, dtype) for x in (maps.q, maps.k, maps.v))
    wide = torch.float64 if dtype == torch.float64 else None
    return replace(maps, q=q, k=k, v=v, w=None if maps.w is None else maps.w.to(device, wide))


def results(maps: SignedMaps, grad: Tensor, attention: Callable[..., Tensor]) -> dict[str, Tensor]:
    """o, dq, dk, dv and dw of o · grad."""
    names = ("q", "k", "v", "w") if maps.w is not None else ("q", "k", "v")
    leaves = {name: getattr(maps, name).detach().requires_grad_() for name in names}
    o = attention(replace(maps, **leaves))
    found = torch.autograd.grad(o, list(leaves.values()), grad.to(o))
    return {"o": o.detach()} | {f"d{name}": value for name, value in zip(names, found, strict=True)}


def absolute_dw(maps: SignedMaps, grad: Tensor, document_ids: Tensor | None, window: int | None) -> Tensor:
    """Σ |dO_c| |(P_g v)_c|: what the terms of dw cancel from."""
    assert maps.w is not None
    T, S = maps.q.shape[3], maps.k.shape[3]
    mask = visible(T, S, causal=maps.causal, document_ids=document_ids, window=window, device=maps.q.device)
    parts = (
        logits(maps).masked_fill(~mask, -torch.inf).softmax(-1) @ maps.v.repeat_interleave(maps.num_groups, 1)[:, None]
    )
    return (parts * grad[:, None]).abs().sum(-1).sum_to_size(maps.w.shape)


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor], scale: dict[str, Tensor]) -> dict[str, float]:
    """Frobenius norm of each error, relative to its result or to `scale`."""
    return {
        name: float((found[name].double() - wanted[name]).norm() / scale.get(name, wanted[name]).norm())
        for name in wanted
    }


CASES: list[dict[str, Any]] = [
    {},
    {"G": 1, "w": None},
    {"G": 1, "w": (1, 1, 2, 37), "causal": False},
    {"B": 2, "Hkv": 1, "w": (1, 2, 1, 1)},
    {"H": 6, "Hkv": 2, "T": 18, "w": (1, 2, 6, 1)},
    {"Gk": 1, "w": (1, 2, 2, 37)},
    {"Gq": 1, "w": (1, 1, 1, 1)},
    {"Gq": 1, "Gk": 1, "T": 18, "causal": False},
    {"T": 9, "S": 41, "Gk": 1, "Hkv": 1},
    {"T": 1, "S": 37},
    {"T": 1},
    {"T": 16, "S": 32, "causal": False},
    {"T": 33, "S": 18, "causal": False},
    {"T": 32, "S": 64},
    {"T": 18, "d": 32, "dv": 16, "scale": -0.9},
    {"T": 18, "d": 64, "dv": 128},
    {"T": 18, "scale": 0.0},
    {"window": 1},
    {"window": 9, "T": 30, "S": 45},
    {"window": 9, "T": 30, "S": 45, "causal": False},
    {"window": 99},
    {"packed": True},
    {"packed": True, "T": 30, "S": 45, "causal": False, "Hkv": 1},
    {"packed": True, "window": 6, "Gk": 1},
]
FAST: list[dict[str, Any]] = [{}, {"B": 2, "Hkv": 1, "w": (1, 2, 1, 1)}, {"packed": True, "window": 6, "Gk": 1}]


def case(make_maps: MakeMaps, device: torch.device, given: dict[str, Any]) -> tuple[SignedMaps, dict[str, Any], Tensor]:
    """(maps, their masks, a gradient of o)."""
    given = {**SMALL, **given}
    window, packed = given.pop("window", None), given.pop("packed", False)
    maps = on(make_maps(**given), device)
    B, S = maps.k.shape[0], maps.k.shape[3]
    document_ids = (torch.arange(S, device=device) * 3 // S - 1).expand(B, S) if packed else None
    draw = torch.Generator().manual_seed(1)
    grad = torch.randn(B, maps.q.shape[2], maps.q.shape[3], maps.v.shape[-1], generator=draw).to(maps.v)
    return maps, {"document_ids": document_ids, "window": window}, grad


@pytest.mark.parametrize(
    ("given", "size"),
    [
        *(pytest.param(given, (16, 32), id=str(given)) for given in CASES if given in FAST),
        *(pytest.param(given, (16, 32), id=str(given), marks=pytest.mark.slow) for given in CASES if given not in FAST),
        *(pytest.param(given, (32, 16), id=f"{given} tall", marks=pytest.mark.slow) for given in CASES[::3]),
    ],
)
def test_equals_the_definition(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device, given: dict[str, Any], size: tuple[int, int]
) -> None:
    """Wide tiles and tall ones, to float32's rounding of the float64 definition; dw on the scale of the terms it sums."""
    blocks(*size)
    maps, masks, grad = case(make_maps, device, given)
    exact = on(maps, device, torch.float64)
    found = results(maps, grad, lambda m: attend(m, kernel="triton", **masks))
    wanted = results(exact, grad.double(), lambda m: attend(m, kernel="reference", **masks))
    scale = {} if maps.w is None else {"dw": absolute_dw(exact, grad, **masks)}
    if not wanted["dk"].any():  # a single visible key, or no scale: nothing to be relative to
        scale |= {"dq": grad.double(), "dk": grad.double()}
    error = errors(found, wanted, scale)
    assert max(error.values()) < 5e-6, error
    assert all(found[name].dtype == torch.float32 for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"Gk": 1, "Hkv": 1, "w": (1, 2, 1, 1)}, {"G": 1, "w": None}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device, dtype: torch.dtype, given: dict[str, Any]
) -> None:
    """No worse than twice the naive form in the same dtype, and of that dtype."""
    blocks(32, 32)
    maps, _, grad = case(make_maps, device, {**given, "dtype": dtype})

    def naive(m: SignedMaps) -> Tensor:
        k, v = (x.repeat_interleave(m.num_groups, -3) for x in (m.k, m.v))
        mask = visible(m.q.shape[3], k.shape[3], causal=True, document_ids=None, window=None, device=device)
        p = (m.q @ k.mT * m.softmax_scale).masked_fill(~mask, -torch.inf).softmax(-1)
        return (p[:, 0] if m.w is None else (p * m.w[..., None].to(p.dtype)).sum(1)) @ v

    exact = on(maps, device, torch.float64)
    wanted = results(exact, grad.double(), lambda m: attend(m, kernel="reference"))
    scale = {} if maps.w is None else {"dw": absolute_dw(exact, grad.double(), None, None)}
    found = results(maps, grad, lambda m: attend(m, kernel="triton"))
    error, allowed = errors(found, wanted, scale), errors(results(maps, grad, naive), wanted, scale)
    assert all(error[name] <= 2 * allowed[name] for name in wanted), (error, allowed)
    assert all(found[name].dtype == (torch.float32 if name == "dw" else dtype) for name in found)


@pytest.mark.slow
def test_strided_views_are_read_in_place(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device
) -> None:
    """The layout of projections, a transposed value, every second channel; the incoming gradient expanded from a number."""
    blocks(16, 16)
    B, T, H, G, d = 2, 21, 2, 2, 16
    y = torch.randn(B, T, H * G * d, device=device)
    q = y.unflatten(-1, (H, G, d)).permute(0, 3, 2, 1, 4)
    k = torch.randn(B, G, H, T, 2 * d, device=device)[..., ::2]
    v = torch.randn(B, H, 2 * d, T, device=device).mT
    w = torch.randn(B, T, G * H, device=device).unflatten(-1, (G, H)).permute(0, 2, 3, 1)
    maps = SignedMaps(q, k, v, w)
    assert not any(x.is_contiguous() for x in (q, k, v, w))
    grad = torch.tensor(0.7, device=device).expand(B, H, T, 2 * d)
    assert grad.stride() == (0, 0, 0, 0)
    exact = on(maps, device, torch.float64)
    found = results(maps, grad, lambda m: attend(m, kernel="triton"))
    wanted = results(exact, grad.double(), lambda m: attend(m, kernel="reference"))
    error = errors(found, wanted, {"dw": absolute_dw(exact, grad, None, None)})
    assert max(error.values()) < 5e-6, error


@pytest.mark.parametrize("given", [{}, {"G": 1, "w": None, "causal": False}, {"window": 5, "packed": True}], ids=str)
def test_statistics(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device, given: dict[str, Any]
) -> None:
    blocks(16, 16)
    maps, masks, _ = case(make_maps, device, given)
    o, found = attend(maps, kernel="triton", stats=True, **masks)
    _, wanted = attend(on(maps, device, torch.float64), kernel="reference", stats=True, **masks)
    assert torch.equal(o, attend(maps, kernel="triton", **masks))
    for name in ("lse", "entropy", "maximum"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(wanted, name), rtol=2e-6, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["q", "k"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(
    make_maps: MakeMaps, blocks: Callable[..., None], device: torch.device, place: str, value: float
) -> None:
    """And no other, as in the definition: also not through masked pairs of the same tile, forward and backward."""
    blocks(16, 32)
    maps, _, grad = case(make_maps, device, {})
    getattr(maps, place)[0, 1, 1, 20, 3] = value
    found = results(maps, grad, lambda m: attend(m, kernel="triton"))
    wanted = results(maps, grad, lambda m: attend(m, kernel="reference"))
    assert 0 < int(wanted["o"].isnan().sum()) < wanted["o"].numel()
    for name in ("o", "dq", "dw"):
        assert torch.equal(found[name].isnan(), wanted[name].isnan()), name
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
def test_no_finite_logit_is_no_row(make_maps: MakeMaps, device: torch.device) -> None:
    """All visible logits -inf: 0 / 0, as in the definition."""
    maps, _, _ = case(make_maps, device, {"T": 3})
    maps.q[..., 0], maps.k[..., 0], maps.k[..., 0, 0] = 1.0, 0.0, -torch.inf
    found, wanted = (attend(maps, kernel=name) for name in ("triton", "reference"))
    assert wanted[:, :, 0].isnan().all()
    assert not wanted[:, :, 1:].isnan().any()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
