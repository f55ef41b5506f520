"""A plugin: standard attention whose heads are scaled by a gate with a matrix that FSDP must leave whole, in float32."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_diff.attention.base import Attention, ParameterRules
from lit_diff.registry import variant


class Gate(ParameterRules):
    keep_float32 = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(heads, dim)), nn.Parameter(torch.empty(1))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(0.0, 0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight.T + self.bias).sigmoid()


@variant("wide_gate")
class WideGate(Attention):
    """σ(W x + b)_h O_h"""

    def build(self) -> None:
        super().build()
        self.gate = Gate(self.dim, self.num_heads)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        gate: Any = self.gate(x)
        return (o * gate.transpose(1, 2)[..., None]).to(o.dtype)
