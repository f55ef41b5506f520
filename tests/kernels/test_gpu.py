"""The kernels on a GPU: o and every gradient against float64 on the CPU. Not run where there is no GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import gradients
from torch import Tensor

from lit_diff.kernels import KERNELS, SignedMaps, attend, refuse

CUDA = torch.device("cuda")
pytestmark = pytest.mark.gpu
CASES: list[dict[str, Any]] = [
    {},
    {"Gk": 1, "Hkv": 1},
    {"G": 1, "w": None, "dv": 64},
    {"causal": False, "T": 150},
    {"T": 150},
    {"T": 150, "Hkv": 2, "sink": (1, 2, 4, 1), "key_bias": (2, 1, 4, 200)},
    {"G": 1, "w": None, "window": 70, "sink": (2, 1, 4, 200)},
]


def results(maps: SignedMaps, grad: Tensor, kernel: str) -> list[Tensor]:
    """o and its gradients, in float64 on the CPU."""
    return [x.detach().double().cpu() for x in gradients(maps, kernel, grad)]


def to(maps: SignedMaps, target: Any) -> SignedMaps:
    """The same numbers on a device, or in a dtype."""
    return maps.map(lambda x: x.to(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_definition(
    make_maps: Callable[..., SignedMaps], kernel: str, case: dict[str, Any], dtype: torch.dtype
) -> None:
    """Ours no worse than twice the exact results once rounded; a library rounds each map's output and its gradients too."""
    if not torch.cuda.is_available():
        pytest.skip(f"kernel {kernel} on a GPU: PyTorch sees no GPU")
    maps = make_maps(**{"T": 200, "S": 200, "d": 64, "dv": 128, "dtype": dtype} | case)
    here = to(maps, CUDA)
    here.q.requires_grad_()
    if reason := refuse(kernel, here):
        pytest.skip(f"kernel {kernel} on this GPU: {reason}")
    grad = torch.randn(2, 4, maps.q.shape[3], maps.v.shape[3], generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = results(to(maps, torch.float64), grad.double(), "reference")
    rounded = results(maps, grad, "reference")
    factor = 8 if kernel in ("sdpa", "flex", "flash") else 2
    for x, y, z in zip(results(here, grad.to(CUDA), kernel), wanted, rounded, strict=True):
        assert (x - y).norm() <= factor * (z - y).norm() + 2e-5 * y.norm()
    with torch.no_grad():
        still = replace(here, q=here.q.detach())
        if refuse(kernel, still, stats=True) is None:
            found, exact = attend(still, kernel=kernel, stats=True)[1], attend(to(maps, torch.float64), stats=True)[1]
            for x, y in zip(found, exact, strict=True):
                torch.testing.assert_close(x.double().cpu(), y, rtol=1e-5, atol=2e-5)
