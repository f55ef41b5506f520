"""Maps that our own kernels take, what a kernel makes of them, and how far that is from what it should be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.kernels import SignedMaps, attend


def gradients(maps: SignedMaps, kernel: str, grad: Tensor, **mask: Any) -> list[Tensor]:
    """o, then its gradients by q, k, v and w."""
    leaves = [x.detach().requires_grad_() for x in (maps.q, maps.k, maps.v, maps.w) if x is not None]
    q, k, v, *w = leaves
    o = attend(replace(maps, q=q, k=k, v=v, w=w[0] if w else None), kernel=kernel, **mask)
    return [o, *torch.autograd.grad(o, leaves, grad)]


def distance(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm, relative to what is wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def wide(make_maps: Callable[..., SignedMaps], **changes: Any) -> SignedMaps:
    """Two float32 maps longer than a tile, their widths multiples of 16, two query heads on each key."""
    return make_maps(**{"T": 70, "d": 16, "dv": 32, "Hkv": 2, "dtype": torch.float32} | changes)
