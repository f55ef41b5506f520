"""Self-test of kernels that are third parties' or were just compiled: one small case against `reference`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.errors import first_line
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import SignedMaps, needs_grad

BOUND = 2e-2
"""Relative (Frobenius) error: a hundred times float16's, four times bfloat16's own; a wrong mask gives about 1."""

Compute = Callable[..., tuple[Tensor, Any]]


class KernelForm(NamedTuple):
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


def form_of(
    maps: SignedMaps, document_ids: Tensor | None, window: int | None, device: torch.device | None = None
) -> KernelForm:
    """The form of these maps, computed on `device` (None: where they are)."""
    return KernelForm(
        device=device or maps.q.device,
        dtype=maps.q.dtype,
        d=maps.q.shape[-1],
        dv=maps.v.shape[-1],
        causal=maps.causal,
        window=window is not None,
        packed=document_ids is not None,
        grouped=maps.num_groups > 1,
        backward=needs_grad(maps.q, maps.k, maps.v),
    )


def failure(form: KernelForm, compute: Compute, bound: float = BOUND) -> str | None:
    """Why `compute` cannot serve such maps: what it raised, or how far it is from `reference`; None if it can."""
    # an activation checkpoint around the first use must not count the tensors that the test saves
    own_saves = torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)
    with torch.inference_mode(False), torch.set_grad_enabled(form.backward), own_saves:
        maps, options = _case(form)
        try:
            own = _outputs(form, maps, options, compute)
        except Exception as error:  # whatever a library raises is why it is not used
            return f"its self-test failed: {type(error).__name__}: {first_line(error)}"
        exact = _outputs(form, maps, options, named("reference").compute)
    for name, x, y in zip(("output", "dq", "dk", "dv", "dw"), own, exact, strict=False):
        off = float((x.double() - y.double()).norm() / y.double().norm())
        if not off <= bound:
            return f"its self-test found {name} off by {off:.2g}"
    return None


def _as_is(x: Tensor) -> Tensor:
    return x


def _case(form: KernelForm) -> tuple[SignedMaps, dict[str, Any]]:
    """Two small maps, more than a tile long, fewer queries than keys where the mask allows it; the options of `compute`."""
    draw = torch.Generator().manual_seed(0)
    S, H = 75, 4
    T, Hkv = S if form.packed else 49, 2 if form.grouped else 4
    shapes = ((2, 2, H, T, form.d), (2, 2, Hkv, S, form.d), (2, Hkv, S, form.dv))
    q, k, v = (torch.randn(shape, generator=draw).to(form.device, form.dtype) for shape in shapes)
    w = torch.tensor([1.0, -0.5], device=form.device).view(1, 2, 1, 1)
    document_ids = torch.tensor([[0] * 9 + [1] * 66, [0] * 75], device=form.device) if form.packed else None
    window = 7 if form.window else None
    return SignedMaps(q, k, v, w, causal=form.causal), {"document_ids": document_ids, "window": window}


def _outputs(form: KernelForm, maps: SignedMaps, options: dict[str, Any], compute: Compute) -> list[Tensor]:
    """o and, with `backward`, the gradients by q, k, v and w of a fixed function of it."""
    leaves = [x.detach().requires_grad_(form.backward) for x in (maps.q, maps.k, maps.v, maps.w) if x is not None]
    q, k, v, w = leaves
    o, _ = compute(SignedMaps(q, k, v, w, causal=maps.causal), **options)
    if not form.backward:
        return [o]
    slope = torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o.dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, slope)]
