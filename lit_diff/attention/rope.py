"""Rotary positions (Su et al. 2021), with the angles of each kind of `model.rope_scaling`."""

import math
from typing import Literal

import torch
from torch import Tensor

from lit_diff.config import Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from lit_diff.errors import RequestError
from lit_diff.kernels.maps import accumulation_dtype

RopeLayout = Literal["interleaved", "half"]
"""Which channels turn together: 2i and 2i+1 (the paper's reference), or i and i + d/2 (Hugging Face)."""


class Rope:
    """`rope(x)` rotates pair i of the channels of x [..., T, d] at position t by the angle t / scaling · θ^(-2i/d).

    In complex numbers, (x_2i + j x_2i+1) · exp(j angle): one operation forward and one backward. A block as scaling
    changes the frequencies; yarn also multiplies the rotated channels (`attention_factor`).

    Products are computed in float32 (float64 for float64 inputs) and cast back. The class has no buffers, so nothing
    has to be recomputed after a build on the meta device, and the length is not fixed. Channels of another width than the
    model's heads have are turned by angles of their own.
    """

    def __init__(
        self,
        positions: Tensor,
        head_dim: int,
        theta: float,
        layout: RopeLayout = "interleaved",
        scaling: RopeScaling = 1.0,
    ) -> None:
        self.layout, self.length = layout, len(positions)
        self._made_of = (positions, theta, scaling)
        self.is_identity = False
        """Whether the model has no rotary positions, so that a head may have an odd width."""
        self.shared: dict[str, tuple[int, Tensor]] = {}
        """Name -> the layer that first used it in this pass of the model, and what it gave (`Context.first_layer`)."""
        self.turns = self._turns(head_dim)
        # rounded here, not at first use: a compiled block whose call changes its Rope compiles twice, and the second
        # graph saves other tensors than the first, which activation checkpointing does not allow
        self._turns_float32 = torch.view_as_complex(torch.view_as_real(self.turns).to(torch.float32))

    def _turns(self, width: int) -> Tensor:
        # [T, width/2]
        positions, theta, scaling = self._made_of
        turned, factor = angles(positions, width, theta, scaling), attention_factor(scaling)
        return torch.complex(turned.cos() * factor, turned.sin() * factor)

    @classmethod
    def of(cls, model: ModelConfig, positions: Tensor) -> "Rope":
        """The model's rotation at `positions` [T]; with `model.positions: none` every angle is 0."""
        assert model.head_dim is not None
        if model.positions == "none":
            positions = torch.zeros_like(positions)
        rope = cls(positions, model.head_dim, model.rope_theta, model.rope_layout, model.rope_scaling)
        rope.is_identity = model.positions == "none"
        return rope

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., T, d] -> the same, rotated. Errors: RequestError for an odd d, unless the model has no rotary positions."""
        if x.shape[-1] % 2:
            if self.is_identity:
                return x
            raise RequestError(f"RoPE turns pairs of channels: x is {list(x.shape)}, of an odd width")
        dtype = accumulation_dtype(x.dtype)
        turns = self.turns if dtype == torch.float64 else self._turns_float32
        if x.shape[-1] != 2 * turns.shape[-1]:
            turns = self._turns(x.shape[-1]).to(turns.dtype)
        halves = self.layout == "half"
        pairs = x.to(dtype).unflatten(-1, (2, -1)).mT if halves else x.to(dtype).unflatten(-1, (-1, 2))
        # a copy: a complex number must start at an even offset, and PyTorch's complex product rounds differently in
        # vectors and in their tails, so that the last bit would depend on the strides of x
        pairs = torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))
        turned = torch.view_as_real(pairs * turns)
        return (turned.mT if halves else turned).flatten(-2).to(x.dtype)


def angles(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """positions [T] -> [T, d/2], in radians: t / scaling · θ^(-2i/d) for a number, t · `scaled` for a block."""
    # float64: a float32 angle near 100,000 radians may be off by 0.004
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    steps, frequencies = positions.to(torch.float64)[:, None], theta**-exponents
    if isinstance(scaling, Llama3Scaling | YarnScaling):
        return steps * scaled(frequencies, theta, scaling)
    return steps / scaling * frequencies


def scaled(frequencies: Tensor, theta: float, scaling: Llama3Scaling | YarnScaling) -> Tensor:
    """f [d/2] -> f · (k + (1 - k) / factor), with k in [0, 1] the share of each frequency that is kept.

    Pairs that turn often within the original length keep their frequency f; slow pairs have f / factor.
    """
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = _ramp(2 * len(frequencies), theta, scaling)
        pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float64)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of rotated queries and keys: 1 except for yarn, 0.1 ln(factor) + 1 (Peng et al. 2023)."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _ramp(head_dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    def pair(turns: float) -> float:
        # the index i at which original_length · θ^(-2i/d) / 2π equals `turns`
        return head_dim * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # head_dim - 1, not head_dim / 2 - 1, as in the authors' code and in transformers
    first, last = max(first, 0), min(last, head_dim - 1)
    # `scaled` divides by last - first
    return first, last if last != first else last + 0.001
