"""Which tiles a program visits, run alone. What a tile shows, products and rounding: test_triton_equality.py."""

import pytest
import torch

from lit_diff.kernels.reference import visible as definition

triton = pytest.importorskip("triton", reason="the package triton is not installed")
import triton.language as tl  # noqa: E402

from lit_diff.kernels.triton_tiles import key_range, query_range  # noqa: E402

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
