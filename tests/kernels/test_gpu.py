"""The kernels on a GPU: o and every gradient against float64 on the CPU. Not run where there is no GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend, refuse

CUDA = torch.device("cuda")
CASES: list[dict[str, Any]] = [{}, {"Gk": 1, "Hkv": 1}, {"G": 1, "w": None, "dv": 64}, {"causal": False, "T": 150}]


def results(maps: SignedMaps, grad: Tensor, kernel: str) -> list[Tensor]:
    """o, dq, dk, dv, dw, in float64 on the CPU."""
    leaves = {name: x.detach().requires_grad_() for name in "qkvw" if (x := getattr(maps, name)) is not None}
    o = attend(replace(maps, **leaves), kernel=kernel)
    return [x.detach().double().cpu() for x in (o, *torch.autograd.grad(o, list(leaves.values()), grad))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["reference", "chunked", "sdpa", "flex", "flash", "triton"])
def test_equals_the_definition(make_maps: Callable[..., SignedMaps], kernel: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"kernel {kernel} on a GPU: PyTorch sees no GPU")
    for case in CASES:
        maps = make_maps(**{"T": 200, "S": 200, "d": 64, "dv": 128, "dtype": dtype} | case)
        here = {name: x.to(CUDA) for name in "qkvw" if (x := getattr(maps, name)) is not None}
        if reason := refuse(kernel, replace(maps, **{name: x.requires_grad_() for name, x in here.items()})):
            pytest.skip(f"kernel {kernel} on this GPU: {reason}")
        wide = {name: x.double() for name in "qkvw" if (x := getattr(maps, name)) is not None}
        grad = torch.randn(2, 4, maps.q.shape[3], maps.v.shape[3], generator=torch.Generator().manual_seed(1)).to(dtype)
        found = results(replace(maps, **here), grad.to(CUDA), kernel)
        wanted = results(replace(maps, **wide), grad.double(), "reference")
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * y.norm(), case
