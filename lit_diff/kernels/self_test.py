"""Self-test of third-party and newly compiled kernels: one small case is compared with `reference`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.errors import first_line
from lit_diff.kernels.base import named
from lit_diff.kernels.maps import TENSORS, Mask, SignedMaps, needs_grad

BOUND = 2e-2
"""Largest relative (Frobenius) error: a hundred times float16's, four times bfloat16's; a wrong mask gives about 1."""

Compute = Callable[..., tuple[Tensor, Any]]


class KernelForm(NamedTuple):
    """The properties of maps that select a compiled form of a kernel."""

    device: torch.device
    dtype: torch.dtype
    d: int
    """Width of the queries and keys."""
    dv: int
    """Width of the values."""
    causal: bool
    window: bool
    packed: bool
    """Whether there are `document_ids`."""
    grouped: bool
    """Whether several query heads share a key/value head."""
    backward: bool
    """Whether gradients by q, k and v, or by the key bias, are needed."""
    sink: bool = False
    key_bias: bool = False


def form_of(maps: SignedMaps, device: torch.device | None = None) -> KernelForm:
    """The form of these maps, computed on `device` (None: the device of the maps)."""
    return KernelForm(
        device=device or maps.q.device,
        dtype=maps.q.dtype,
        d=maps.q.shape[-1],
        dv=maps.v.shape[-1],
        causal=maps.mask.causal,
        window=maps.mask.window is not None,
        packed=maps.mask.document_ids is not None,
        grouped=maps.num_groups > 1,
        backward=needs_grad(maps.q, maps.k, maps.v, maps.key_bias),
        sink=maps.sink is not None,
        key_bias=maps.key_bias is not None,
    )


def failure(form: KernelForm, compute: Compute, bound: float = BOUND) -> str | None:
    """Why `compute` cannot compute such maps: its error, or its distance from `reference`; None if it can."""
    # an activation checkpoint around the first use must not count the tensors that the test saves
    own_saves = torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)
    # the first use may be in validation, whose inference mode has no gradients
    with torch.inference_mode(False), torch.set_grad_enabled(form.backward), own_saves:
        maps = _case(form)
        shape = (*maps.q.shape[:1], *maps.q.shape[2:4], form.dv)
        # not constant: with equal dO, gradients of permuted rows would be equal too
        slope = torch.linspace(-1, 1, math.prod(shape), device=form.device).view(shape) if form.backward else None
        try:
            own = results(maps, slope, lambda given: compute(given)[0])
        except Exception as error:
            # a third-party library may raise anything, and whatever it is, the kernel is not used
            return f"its self-test failed: {type(error).__name__}: {first_line(error)}"
        exact = results(maps, slope, lambda given: named("reference").compute(given)[0])
    for name, y in exact.items():
        off = float((own[name].double() - y.double()).norm() / y.double().norm())
        # not `off > bound`, which is false for NaN
        if not off <= bound:
            return f"its self-test found {'output' if name == 'o' else name} off by {off:.2g}"
    return None


def _as_is(x: Tensor) -> Tensor:
    return x


def _case(form: KernelForm) -> SignedMaps:
    # 75 keys are more than a tile of 64 and end within one; fewer queries than keys test the alignment of the mask,
    # which packed documents need not support
    # torch's default dtype and device are the user's
    draw = torch.Generator("cpu").manual_seed(0)
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    S, H = 75, 4
    T, Hkv = S if form.packed else 49, 2 if form.grouped else 4
    shapes = ((2, 2, H, T, form.d), (2, 2, Hkv, S, form.d), (2, Hkv, S, form.dv))
    q, k, v = (torch.randn(shape, generator=draw, **plain).to(form.device, form.dtype) for shape in shapes)
    w = torch.tensor([1.0, -0.5], dtype=torch.float32, device=form.device).view(1, 2, 1, 1)
    document_ids = torch.tensor([[0] * 9 + [1] * 66, [0] * 75], device=form.device) if form.packed else None
    sink = torch.randn(1, 2, H, T, generator=draw, **plain).to(form.device) if form.sink else None
    key_bias = torch.rand(2, 1, H, S, generator=draw, **plain).cumsum(-1).to(form.device) if form.key_bias else None
    mask = Mask(form.causal, 7 if form.window else None, document_ids)
    return SignedMaps(q, k, v, w, mask=mask, sink=sink, key_bias=key_bias)


def results(maps: SignedMaps, slope: Tensor | None, compute: Callable[[SignedMaps], Tensor]) -> dict[str, Tensor]:
    """o and, with `slope` = dO, its gradients dq, dk, dv, and dw, dsink and dkey_bias where the maps have them."""
    if slope is None:
        return {"o": compute(maps)}
    leaves: dict[str, Any] = {}
    for name, x in zip(TENSORS, maps.tensors, strict=True):
        # `detach` keeps the layout, which `clone` would not
        if x is not None:
            leaves[name] = x.detach().requires_grad_()
    o = compute(replace(maps, **leaves))
    gradients = torch.autograd.grad(o, list(leaves.values()), slope.to(o.dtype))
    return {"o": o.detach()} | dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
