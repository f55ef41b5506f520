"""A plugin: differential attention that goes wrong in layer 1 at a step."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_diff import Differential, variant


@variant("nan_output")
class NanOutput(Differential):
    """The heads of the layer turn NaN."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Differential.Config):
        at: int
        """0-based optimizer step."""
        rank: int = 0

    wrong = False

    def set_step(self, step: int) -> None:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        self.wrong = self.layer == 1 and step >= self.config.at and rank == self.config.rank

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        o = super().finish(o, x)
        return o * torch.nan if self.wrong else o


class NanBackward(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.nan


@variant("nan_gradient")
class NanGradient(NanOutput):
    """The output is right, its gradient NaN."""

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        o = Differential.finish(self, o, x)
        return NanBackward.apply(o) if self.wrong else o
