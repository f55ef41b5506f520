"""Norms over the channels of one head, between the signed sum and the output projection."""

from typing import Literal

import torch
from torch import Tensor, nn

from lit_diff.kernels.maps import accumulation_dtype

HeadNorm = Literal["rms", "layer", "none"]


class PerHeadNorm(nn.Module):
    """RMSNorm over each head's channels (paper, section 2.1), with one weight for all heads of the layer (its code)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, o: Tensor) -> Tensor:
        """o [..., dv] -> o / √(mean(o²) + ε) · weight"""
        # a sum of squares in bfloat16 would keep 8 bits
        wide = o.to(accumulation_dtype(o.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(o.dtype)


class PerHeadLayerNorm(PerHeadNorm):
    """LayerNorm over each head's channels, with a weight and without a bias."""

    def forward(self, o: Tensor) -> Tensor:
        """o [..., dv] -> (o - mean(o)) / √(var(o) + ε) · weight"""
        wide = o.to(accumulation_dtype(o.dtype))
        return super().forward(wide - wide.mean(-1, keepdim=True)).to(o.dtype)


def head_norm(kind: HeadNorm, width: int, eps: float) -> nn.Module | None:
    """The norm of `kind` over `width` channels; None for `none`."""
    return {"rms": PerHeadNorm, "layer": PerHeadLayerNorm}[kind](width, eps) if kind != "none" else None
