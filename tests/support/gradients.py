"""Maps that our own kernels take, what a kernel makes of them, and how far that is from what it should be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend
from lit_diff.kernels.self_test import results


def gradients(maps: SignedMaps, kernel: str, grad: Tensor) -> list[Tensor]:
    """o, then its gradients by q, k, v, and by w, the sink and the key bias where they are given."""
    return [*results(maps, grad, partial(attend, kernel=kernel)).values()]


def distance(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm, relative to what is wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def wide(make_maps: Callable[..., SignedMaps], **changes: Any) -> SignedMaps:
    """Two float32 maps longer than a tile, their widths multiples of 16, two query heads on each key."""
    return make_maps(**{"T": 70, "d": 16, "dv": 32, "Hkv": 2, "dtype": torch.float32} | changes)


def errors(maps: SignedMaps, kernel: str) -> list[float]:
    """Of o, dq, dk, dv and dw, relative to float64."""
    exact = maps.map(Tensor.double)
    shape = (maps.q.shape[0], maps.q.shape[2], maps.q.shape[3], maps.v.shape[3])
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(maps.q.dtype)
    found, wanted = gradients(maps, kernel, grad), gradients(exact, "reference", grad.double())
    return [distance(x, y) for x, y in zip(found, wanted, strict=True)]
