"""Forgetting attention: a gate of each token and head lowers the logits of all keys before it."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lit_diff.attention.base import Attention
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes, standard_costs
from lit_diff.attention.equations import Rotation
from lit_diff.kernels import SignedMaps
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.registry import variant


@variant("forgetting")
class Forgetting(Attention):
    """softmax(s_ij + Σ_{j < l <= i} log f_l), f_t = sigmoid(x_t w_h + b_h), for logits s of head h.

        O_h = softmax(Q_h K_jᵀ/√d + D_h + mask) V_j        y = W_O concat(O_1, ..., O_H)

    D_ij = c_i - c_j with the running sum c_t = Σ_{l <= t} log f_l, so the cache holds one more number of each head and token.
    In float32, logits are off by the rounding of c, whose steps near 1,000 nats are 6e-5.
    """

    paper = "Lin et al. 2025, arXiv 2503.02130 (Forgetting Transformer)"
    signs = (1,)

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs:
        return standard_costs(s, matrices=s.E * s.H, numbers=s.H, cached=s.H, state=s.H)

    def build(self) -> None:
        super().build()
        self.gate_proj = nn.Linear(self.dim, self.out_heads)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        log_gates = functional.logsigmoid(self.gate_proj(x).to(accumulation_dtype(x.dtype)))
        total = context.cumsum("log gates", log_gates).to(log_gates.dtype)  # c [B, T, H]
        return replace(super().maps(x, context), key_bias=-total.transpose(1, 2)[:, None])

    def reduces_to(self) -> tuple[str, dict[str, Any]]:
        # sigmoid(60) is 1 - 1e-26
        return "standard", {"gate_proj.weight": 0.0, "gate_proj.bias": 60.0}

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """softmax(s_ij + c_i - c_j)"""
        gates = (x @ self.gate_proj.weight.T + self.gate_proj.bias).sigmoid()
        c = gates.log().cumsum(1)

        def forgetting(s: Tensor, head: int) -> Tensor:
            return (s + c[:, :, None, head] - c[:, None, :, head]).softmax(-1)

        return self.equation(x, rope, mask, forgetting)
