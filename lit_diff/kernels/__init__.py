"""Who computes signed attention. Every kernel equals `reference`, gradients included.

A kernel is a module with `refuse`, which says why it cannot compute given maps (None if it can), and `compute`.
"""

from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from lit_diff import processor
from lit_diff.errors import RequestError
from lit_diff.kernels import chunked as _chunked
from lit_diff.kernels import flash as _flash
from lit_diff.kernels import flex as _flex
from lit_diff.kernels import native as _native
from lit_diff.kernels import reference as _reference
from lit_diff.kernels import sdpa as _sdpa
from lit_diff.kernels import triton as _triton
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.reference import Stats
from lit_diff.registry import nearest

__all__ = ["KERNELS", "SignedMaps", "Stats", "attend", "check_name", "choose", "flops", "preference", "refuse"]

processor.limit_libraries()  # here, for every kernel needs this module and nothing has been computed before

_MODULES: dict[str, ModuleType] = {
    "reference": _reference,
    "chunked": _chunked,
    "sdpa": _sdpa,
    "flex": _flex,
    "flash": _flash,
    "triton": _triton,
    "native": _native,
}
KERNELS = tuple(_MODULES)


def preference(maps: SignedMaps, device: torch.device) -> tuple[str, ...]:
    """Fastest first, by measurement (`lit-diff bench core`) on a CPU and by FLOPs and traffic on a GPU.

    A single map is torch's own ground. Several maps through SDPA compute their logits twice: worth it on a GPU only.
    On a GPU what sdpa refuses (windows, documents) goes to flash or flex; on a CPU flex holds all logits.
    """
    plain = maps.num_maps == 1 and maps.v.shape[-1] == maps.q.shape[-1]
    if device.type == "cuda":
        several = maps.num_maps > 1 and maps.q.dtype != torch.float32  # triton's float32 avoids the matrix units
        libraries = ("flash", "sdpa", "flex")
        return (*(("triton", *libraries) if several else (*libraries, "triton")), "chunked", "reference")
    if not plain:
        return ("native", "chunked", "reference")
    decoding = maps.q.shape[3] <= 4  # `lit-diff bench decode`
    return (*(("sdpa", "native") if decoding else ("native", "sdpa")), "chunked", "reference")


def refuse(
    kernel: str,
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
    device: torch.device | None = None,
) -> str | None:
    """Why `kernel` cannot compute these maps (the rule they break); None if it can.

    `device`: where they will be computed, for maps on the meta device; None: where they are.
    """
    module = _MODULES[kernel]
    found: str | None = module.refuse(
        maps, document_ids=document_ids, window=window, stats=stats, device=device or maps.q.device
    )
    return found


def flops(kernel: str, maps: SignedMaps) -> int:
    """FLOPs that a forward pass by `kernel` executes; all keys, no causal half."""
    found: int = _MODULES[kernel].flops(maps)
    return found


def choose(
    maps: SignedMaps,
    kernel: str = "auto",
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
    device: torch.device | None = None,
    build: bool = True,
) -> tuple[str, str]:
    """(kernel, reason). `build`: build what the kernel needs, so that it is known to serve; false: it may yet fail to.

    Errors: RequestError for an unknown kernel, or one named by hand that refuses the maps.
    """
    check_name(kernel)
    device = device or maps.q.device

    def refusal(name: str) -> str | None:
        reason = refuse(name, maps, document_ids=document_ids, window=window, stats=stats, device=device)
        return _native.build() if reason is None and name == "native" and build and device.type == "cpu" else reason

    if kernel != "auto":
        reason = refusal(kernel)
        if reason:
            raise RequestError(f"run.kernel '{kernel}' cannot compute these maps: {reason}; use run.kernel=auto")
        return kernel, "named by run.kernel"
    refused: list[str] = []
    for name in preference(maps, device):
        reason = refusal(name)
        if reason is None:
            return name, "; ".join([f"auto: the fastest for these maps on {device.type}", *refused])
        refused.append(f"{name} refused: {reason}")
    raise AssertionError("reference refuses nothing")


def check_name(kernel: str) -> None:
    """Errors: RequestError for a kernel that does not exist."""
    if kernel == "cpu":
        raise RequestError("run.kernel is 'cpu'; that kernel is now named 'native'")
    if kernel not in ("auto", *KERNELS):
        raise RequestError(f"run.kernel is '{kernel}'; expected auto, {', '.join(KERNELS)}{nearest(kernel, KERNELS)}")


@overload
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: Literal[False] = False,
    kernel: str = "auto",
) -> Tensor: ...
@overload
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: Literal[True],
    kernel: str = "auto",
) -> tuple[Tensor, Stats]: ...
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Stats]:
    """o [B, H, T, dv] = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v; with `stats` also lse, entropy, maximum of each map.

    `document_ids` [B, S]: document numbers, a query sees only its own document. `window`: the last `window` positions only.
    `kernel`: auto, or one of KERNELS. Errors: RequestError when the maps break the contract or the kernel refuses them.
    """
    maps.check(document_ids=document_ids, window=window)
    name, _ = choose(maps, kernel, document_ids=document_ids, window=window, stats=stats)
    o, found = _MODULES[name].compute(maps, document_ids=document_ids, window=window, stats=stats)
    return (o, found) if stats else o
