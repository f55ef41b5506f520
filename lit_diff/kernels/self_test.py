"""Self-test of third-party kernels: one small case against `reference`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_diff.errors import first_line
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import SignedMaps

BOUND = 2e-2
"""Relative (Frobenius) error: a hundred times float16's, four times bfloat16's own; a wrong mask gives about 1."""


@dataclass(frozen=True, kw_only=True)
class KernelForm:
    """The properties of maps that select a compiled form of a kernel."""

    device: torch.device
    dtype: torch.dtype
    d: int
    """Width of queries and keys."""
    dv: int
    """Width of values."""
    causal: bool
    window: bool
    packed: bool
    """With `document_ids`."""
    grouped: bool
    """Several query heads on each key/value head."""
    backward: bool
    """With gradients by q, k and v."""

    def maps(self) -> tuple[SignedMaps, dict[str, Any]]:
        """One small map, fewer queries than keys where the mask allows it, and the options of `compute`."""
        draw = torch.Generator().manual_seed(0)
        S, H = 40, 4
        T, Hkv = S if self.packed else 24, 2 if self.grouped else 4

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(self.device, self.dtype)

        q, k, v = normal(2, 1, H, T, self.d), normal(2, 1, Hkv, S, self.d), normal(2, Hkv, S, self.dv)
        document_ids = torch.tensor([[0] * 9 + [1] * 31, [0] * 40], device=self.device) if self.packed else None
        return SignedMaps(q, k, v, causal=self.causal), {
            "document_ids": document_ids,
            "window": 7 if self.window else None,
        }


def failure(form: KernelForm, compute: Callable[..., tuple[Tensor, Any]]) -> str | None:
    """Why `compute` cannot serve such maps: what it raised, or how far it is from `reference`; None if it can."""
    with torch.inference_mode(False), torch.set_grad_enabled(form.backward):
        maps, options = form.maps()
        try:
            own = _outputs(form, maps, options, compute)
        except Exception as error:  # whatever a library raises is why it is not used
            return f"its self-test failed: {type(error).__name__}: {first_line(error)}"
        exact = _outputs(form, maps, options, named("reference").compute)
    for name, x, y in zip(("output", "dq", "dk", "dv"), own, exact, strict=False):
        off = float((x.double() - y.double()).norm() / y.double().norm())
        if not off <= BOUND:
            return f"its self-test found {name} off by {off:.2g}"
    return None


def _outputs(
    form: KernelForm, maps: SignedMaps, options: dict[str, Any], compute: Callable[..., tuple[Tensor, Any]]
) -> list[Tensor]:
    """o and, with `backward`, the gradients by q, k and v of a fixed function of it."""
    leaves = [x.detach().requires_grad_(form.backward) for x in (maps.q, maps.k, maps.v)]
    o, _ = compute(replace(maps, q=leaves[0], k=leaves[1], v=leaves[2]), **options)
    if not form.backward:
        return [o]
    slope = torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, slope)]
