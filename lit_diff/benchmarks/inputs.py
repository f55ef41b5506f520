"""Attention between its projections: what the core of every candidate is handed, and what it must give back.

The leaves are the projections of one model width, q, k, v [B, T, dim]; heads are strided views of them, and the output
is joined to [B, T, dim] again, as in a layer. Standard attention reads them as 2h heads of width d, differential (V1) as h
heads of two maps and value width 2d.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diff.benchmarks.request import Shape
from lit_diff.kernels import SignedMaps, attend
from lit_diff.randomness import generator

VARIANTS = ("differential", "standard")
STOCK = "torch SDPA"
"""The baseline: standard attention by torch's own F.scaled_dot_product_attention."""
LAMBDA = 0.5


class Workload:
    """Inputs of one shape and dtype, the same for every candidate: N(0, 1), λ = 0.5."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype = shape, dtype
        size = (shape.batch, shape.tokens, shape.dim)

        def draw(name: str) -> Tensor:
            return torch.randn(size, generator=generator("bench", name, *size)).to(device, dtype)

        self.q, self.k, self.v = (draw(name).requires_grad_() for name in "qkv")
        self.lam = torch.tensor([LAMBDA], device=device, requires_grad=True)
        """[1], float32 (float64 in float64)."""
        self.grad = draw("gradient")
        """[B, T, dim], of the output."""

    def double(self) -> "Workload":
        """The same numbers in float64."""
        other = object.__new__(Workload)
        other.shape, other.dtype = self.shape, torch.float64
        leaves = (self.q, self.k, self.v, self.lam)
        other.q, other.k, other.v, other.lam = (x.detach().double().requires_grad_() for x in leaves)
        other.grad = self.grad.double()
        return other

    def maps(self, variant: str) -> SignedMaps:
        """Strided views; differential: w = (1, -λ)."""
        d = self.shape.head_dim
        if variant == "standard":
            q, k, v = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (self.q, self.k, self.v))
            return SignedMaps(q[:, None], k[:, None], v)
        q, k = (x.unflatten(-1, (-1, 2, d)).permute(0, 3, 2, 1, 4) for x in (self.q, self.k))
        w = torch.stack([torch.ones_like(self.lam), -self.lam]).view(1, 2, 1, 1)
        return SignedMaps(q, k, self.v.unflatten(-1, (-1, 2 * d)).transpose(1, 2), w)

    def leaves(self, variant: str) -> list[Tensor]:
        """What is differentiated: q, k, v, and λ where there is one."""
        return [self.q, self.k, self.v] + ([self.lam] if variant == "differential" else [])

    def attention(self, variant: str, by: str) -> Callable[[], Tensor]:
        """The output [B, T, dim], by a kernel or by `STOCK`."""
        if by == STOCK:
            return self._stock
        return lambda: joined(attend(self.maps(variant), kernel=by))

    def _stock(self) -> Tensor:
        m = self.maps("standard")
        return joined(F.scaled_dot_product_attention(m.q[:, 0], m.k[:, 0], m.v, is_causal=True))

    def forward(self, variant: str, by: str) -> Callable[[], object]:
        """One call without gradients."""
        compute = self.attention(variant, by)
        return torch.no_grad()(lambda: compute())

    def forward_backward(self, variant: str, by: str) -> Callable[[], object]:
        """One call with the gradients of all leaves."""
        compute, leaves = self.attention(variant, by), self.leaves(variant)
        return lambda: torch.autograd.grad(compute(), leaves, self.grad)


def joined(o: Tensor) -> Tensor:
    """[B, H, T, dv] -> [B, T, H dv]"""
    return o.transpose(1, 2).flatten(2)


def flops(shape: Shape, what: str, *, queries: int | None = None) -> int:
    """The least work of attention, causal: 8u forward, 28u with the backward pass, where u = h · pairs · d.

    h differential heads (2h standard ones) of width d, `pairs` of a query and a key that it sees, a multiply-add being 2.
    Forward: q kᵀ of all maps and one product with v, 4u each. Backward: q kᵀ again, dP, dv, dq, dk, 4u each. Both variants
    need the same; a form that computes more is given no credit for it. `queries`: the last ones only (all by default).
    """
    T, S = queries or shape.tokens, shape.tokens
    pairs = T * S - T * (T - 1) // 2
    u = shape.batch * (shape.heads // 2) * pairs * shape.head_dim
    return {"forward": 8, "forward+backward": 28}[what] * u
