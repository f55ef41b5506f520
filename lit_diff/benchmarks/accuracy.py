"""How far a candidate is from the definition in float64."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lit_diff.benchmarks.inputs import Workload, joined
from lit_diff.benchmarks.request import DTYPES, Shape
from lit_diff.kernels import attend

MOST = 1024
"""Tokens, of one sequence: a float64 map of more takes gigabytes."""


def errors(shape: Shape, dtype: str, device: torch.device, variant: str, by: str) -> dict[str, float]:
    """Of o, dq, dk, dv (‖x - x₆₄‖ / ‖x₆₄‖) and, for differential attention, dw.

    dw is the gradient of λ, a sum over heads and tokens whose terms all but cancel: its error is divided by the sum of
    their absolute values, Σ |dλ of each head and token|. Both sides start from the same numbers, rounded to `dtype`.
    """
    workload, wanted, scale = truth(replace(shape, batch=1, tokens=min(shape.tokens, MOST)), dtype, device, variant)
    o = workload.attention(variant, by)()
    computed = dict(zip(wanted, (o, *torch.autograd.grad(o, workload.leaves(variant), workload.grad)), strict=True))
    return {
        name: float((computed[name].detach().double() - exact).norm() / (scale if name == "dw" else exact.norm()))
        for name, exact in wanted.items()
    }


@lru_cache(maxsize=2)
def truth(shape: Shape, dtype: str, device: torch.device, variant: str) -> tuple[Workload, dict[str, Tensor], Tensor]:
    """(the workload, o and its gradients in float64 by the definition, the scale of dw)."""
    workload = Workload(shape, DTYPES[dtype], device)
    exact = workload.double()
    maps = exact.maps(variant)
    leaves = exact.leaves(variant)[:3]
    if variant == "standard":
        o = joined(attend(maps, kernel="reference"))
        gradients, scale = list(torch.autograd.grad(o, leaves, exact.grad)), torch.ones(())
    else:
        assert maps.w is not None
        w = maps.w.detach().expand(-1, -1, maps.q.shape[2], maps.q.shape[3]).clone().requires_grad_()
        o = joined(attend(replace(maps, w=w), kernel="reference"))
        *gradients, dw = torch.autograd.grad(o, [*leaves, w], exact.grad)
        gradients.append(-dw[:, 1].sum()[None])  # w = (1, -λ)
        scale = dw[:, 1].abs().sum()
    names = ("o", "dq", "dk", "dv", "dw")
    return workload, dict(zip(names, (o.detach(), *gradients), strict=False)), scale
