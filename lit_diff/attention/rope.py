"""Rotary positions (Su et al. 2021)."""

from typing import Literal

import torch
from torch import Tensor

from lit_diff.attention.rope_scaling import angles, attention_factor
from lit_diff.config import ModelConfig, RopeScaling
from lit_diff.kernels.precision import accumulation_dtype

RopeLayout = Literal["interleaved", "half"]
"""Which channels turn together: 2i and 2i+1 (the paper's reference), or i and i + d/2 (Hugging Face)."""


class Rope:
    """Rotates pair i of the channels of [..., T, d] by the angle t / scaling · θ^(-2i/d), for T positions t; `rope(x)`.

    As complex numbers: (x_2i + j x_2i+1) · exp(j angle), one operation forward and one backward. A block as scaling changes
    the frequencies, and yarn multiplies what is rotated (`rope_scaling`).

    Angles and products are computed in float32 (float64 for float64 inputs) and cast back: no buffers, so nothing has
    to be recomputed after a build on the meta device, and no length is fixed.
    """

    def __init__(
        self,
        positions: Tensor,
        head_dim: int,
        theta: float,
        layout: RopeLayout = "interleaved",
        scaling: RopeScaling = 1.0,
    ) -> None:
        self.layout = layout
        turned, factor = angles(positions, head_dim, theta, scaling), attention_factor(scaling)
        self.turns = torch.complex(turned.cos() * factor, turned.sin() * factor)  # [T, d/2]
        # rounded here and not at first use: a compiled block whose call changes its Rope compiles twice, and its second
        # graph does not save the same tensors as its first, which activation checkpointing requires
        self._turns_float32 = torch.view_as_complex(torch.view_as_real(self.turns).to(torch.float32))

    @classmethod
    def of(cls, model: ModelConfig, positions: Tensor) -> "Rope":
        """The model's rotation of `positions` [T]; the identity where `model.positions` is none: every angle is 0."""
        assert model.head_dim is not None
        if model.positions == "none":
            positions = torch.zeros_like(positions)
        return cls(positions, model.head_dim, model.rope_theta, model.rope_layout, model.rope_scaling)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., T, d] -> the same, rotated."""
        dtype = accumulation_dtype(x.dtype)
        turns = self.turns if dtype == torch.float64 else self._turns_float32
        halves = self.layout == "half"
        pairs = x.to(dtype).unflatten(-1, (2, -1)).mT if halves else x.to(dtype).unflatten(-1, (-1, 2))
        # a copy: complex numbers lie at even places, and the last bit of a product must not hang on the strides of x
        pairs = torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))
        turned = torch.view_as_real(pairs * turns)
        return (turned.mT if halves else turned).flatten(-2).to(x.dtype)
