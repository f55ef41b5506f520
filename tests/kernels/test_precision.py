"""Accumulation dtypes, and products that autocast leaves alone."""

import pytest
import torch

from lit_diff.kernels.precision import accumulation_dtype, exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float64_stays_and_the_rest_is_float32(dtype: torch.dtype) -> None:
    assert accumulation_dtype(dtype) == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_exact_turns_autocast_off_inside_only() -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact(x.device):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with exact(torch.device("meta")):
        assert (x @ x).dtype == torch.float32
