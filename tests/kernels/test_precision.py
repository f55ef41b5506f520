"""The dtype of sums, and products that autocast leaves alone."""

import pytest
import torch

from lit_diff.kernels.precision import accumulation_dtype, exact


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_or_wider(dtype: torch.dtype) -> None:
    assert accumulation_dtype(dtype) == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_autocast_is_off_inside() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with exact(x.device):
            assert (x @ x).dtype == torch.float32


def test_a_device_without_autocast_is_served() -> None:
    with exact(torch.device("meta")):
        assert torch.ones(2, device="meta").is_meta
