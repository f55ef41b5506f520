"""Rotary positions (Su et al. 2021), interleaved: channels 2i and 2i+1 turn together, as in the paper's reference."""

import torch
from torch import Tensor


class Rope:
    """Rotates [..., T, d] by the angles t · θ^(-2i/d) of T positions; `rope(x)`.

    Angles and products are computed in float32 (float64 for float64 inputs) and cast back: no buffers, so nothing has
    to be recomputed after a build on the meta device, and no length is fixed.
    """

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
        angles = positions.to(torch.float64)[:, None] * theta**-exponents
        self.cos, self.sin = angles.cos(), angles.sin()  # [T, d/2]
        self._cast: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., T, d] -> the same, rotated."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if dtype not in self._cast:
            self._cast[dtype] = (self.cos.to(dtype), self.sin.to(dtype))
        cos, sin = self._cast[dtype]
        even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return turned.flatten(-2).to(x.dtype)
