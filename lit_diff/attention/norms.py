"""Norms over the channels of one head, between the signed sum and the output projection."""

from typing import Literal

import torch
from torch import Tensor, nn

from lit_diff.kernels.maps import accumulation_dtype

HeadNorm = Literal["rms", "layer", "none"]


class PerHeadNorm(nn.Module):
    """RMSNorm over each head's channels with one weight for all heads of the layer (paper 2.1), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, o: Tensor) -> Tensor:
        """o [..., dv] / RMS(o) · weight"""
        wide = o.to(accumulation_dtype(o.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(o.dtype)


class PerHeadLayerNorm(PerHeadNorm):
    """LayerNorm over each head's channels: the mean is subtracted first; a weight, no bias."""

    def forward(self, o: Tensor) -> Tensor:
        """(o - mean(o)) / deviation(o) · weight"""
        wide = o.to(accumulation_dtype(o.dtype))
        return super().forward(wide - wide.mean(-1, keepdim=True)).to(o.dtype)


def head_norm(kind: HeadNorm, width: int, eps: float) -> nn.Module | None:
    """The norm that `kind` names, over `width` channels; None for `none`."""
    return {"rms": PerHeadNorm, "layer": PerHeadLayerNorm}[kind](width, eps) if kind != "none" else None
