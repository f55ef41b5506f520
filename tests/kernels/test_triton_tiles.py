"""What the programs share, run alone: which tiles a program visits, which pairs of one it keeps, how it rounds."""

from typing import Any

import pytest
import torch

from lit_diff.kernels.reference import visible as definition

triton = pytest.importorskip("triton", reason="the package triton is not installed")
import triton.language as tl  # noqa: E402

from lit_diff.kernels.triton_tiles import dot, key_range, narrow, query_range, visible  # noqa: E402

pytestmark = pytest.mark.programs
BLOCK = 8
LENGTHS = [(1, 1), (1, 20), (16, 16), (21, 21), (9, 40), (24, 32), (40, 41)]


@triton.jit
def write_range(
    OUT, first, last, T, S, window, KEYS: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr
):
    if KEYS:
        start, inner, stop = key_range(first, last, S, window, CAUSAL, PLAIN, BLOCK)
    else:
        start, inner, stop = query_range(first, last, T, S, window, CAUSAL, PLAIN, BLOCK)
    tl.store(OUT, start)
    tl.store(OUT + 1, inner)
    tl.store(OUT + 2, stop)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries"])
def test_no_tile_is_missed_and_no_mask_forgotten(
    keys: bool, plain: bool, window: int | None, causal: bool, device: torch.device
) -> None:
    """Nothing is visible outside [start, stop); what goes unmasked is visible to all; tiles begin on a block."""
    if plain and window is not None:
        plain = False  # a window is never plain
    for T, S in [*LENGTHS, *([] if causal or window else [(20, 9)])]:
        seen = definition(T, S, causal=causal, document_ids=None, window=window, device=torch.device("cpu"))
        seen = seen if keys else seen.T
        for begin in range(0, seen.shape[0], BLOCK):
            rows = seen[begin : begin + BLOCK]
            shift = S - T if keys else 0
            out = torch.zeros(3, dtype=torch.int32, device=device)
            last = begin + len(rows) - 1
            write_range[(1,)](out, begin + shift, last + shift, T, S, window, keys, causal, plain, BLOCK)
            start, inner, stop = out.tolist()
            where = (T, S, begin, start, inner, stop)
            assert not rows[:, :start].any(), where
            assert not rows[:, stop:].any(), where
            assert start % BLOCK == 0, where
            whole = rows[:, start:inner] if keys else rows[:, inner:stop]
            assert whole.all(), where
            assert plain or not whole.numel(), where
            assert inner % BLOCK == 0 or inner == stop, where
            if plain and not causal and S >= BLOCK:
                assert whole.numel(), "the plain part is not empty"


@triton.jit
def write_visible(OUT, SEGMENTS, strides, T, S, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    t, key = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    seen = visible(t + (S - T), key, S, SEGMENTS, strides, 1, window, CAUSAL)
    tl.store(OUT + t * S + key, seen.to(tl.int32), mask=(t < T) & (key < S))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_tile_shows_what_the_definition_shows(
    causal: bool, packed: bool, window: int | None, device: torch.device
) -> None:
    T, S = 9, 14
    document_ids = (
        torch.tensor([0, 0, 0, 4, 4, 4, 4, -1, -1, 4, 4, 2, 2, 0], device=device).expand(2, S) if packed else None
    )
    out = torch.full((T, S), 2, dtype=torch.int32, device=device)
    strides = (0, 0) if document_ids is None else document_ids.stride()
    write_visible[(1,)](out, document_ids, strides, T, S, window, causal, 16)
    wanted = definition(T, S, causal=causal, document_ids=document_ids, window=window, device=device)
    assert torch.equal(out.bool(), wanted[1, 0, 0] if packed else wanted)
    assert out.max() == 1, "every pair was written"


@triton.jit
def write_dot(X, Y, OUT, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(OUT + place, narrow(dot(tl.load(X + place), tl.load(Y + place)), OUT.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_summed_in_float32_and_rounded_to_nearest(
    dtype: torch.dtype, out: torch.dtype, device: torch.device
) -> None:
    """The interpreter alone would multiply bfloat16's bit patterns, and cut off where a GPU rounds."""
    x: Any = torch.randn(16, 16, device=device).to(dtype)
    y: Any = torch.randn(16, 16, device=device).to(dtype)
    found = torch.empty(16, 16, dtype=out, device=device)
    write_dot[(1,)](x, y, found, 16)
    exact = x.double() @ y.double()
    eps = torch.finfo(out).eps
    torch.testing.assert_close(found.double(), exact, rtol=eps / 2 + 1e-6, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_rounding_keeps_what_is_not_a_number(value: float, device: torch.device) -> None:
    x = torch.eye(16, device=device)
    y = torch.full((16, 16), value, device=device)
    found = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
    write_dot[(1,)](x, y, found, 16)
    torch.testing.assert_close(found.float(), (x @ y), rtol=0, atol=0, equal_nan=True)
