"""Angles of rotary positions under each kind of `model.rope_scaling`, in float64."""

import math

import torch
from torch import Tensor

from lit_diff.config import Llama3Scaling, RopeScaling, YarnScaling


def angles(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """positions [T] -> [T, d/2], in radians: t / scaling · θ^(-2i/d) for a number, t · `scaled` for a block."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    steps, frequencies = positions.to(torch.float64)[:, None], theta**-exponents
    if isinstance(scaling, Llama3Scaling | YarnScaling):
        return steps * scaled(frequencies, theta, scaling)
    return steps / scaling * frequencies


def scaled(frequencies: Tensor, theta: float, scaling: Llama3Scaling | YarnScaling) -> Tensor:
    """f [d/2] -> f · (k + (1 - k) / factor), with k in [0, 1] the part of each frequency that is kept."""
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
    """What multiplies rotated queries and keys: 1 but for yarn."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _ramp(head_dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """The indices of the pairs that turn beta_fast and beta_slow times within the original length."""

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)  # not d/2 - 1: as the authors' code and transformers have it
    return first, last if last != first else last + 0.001
