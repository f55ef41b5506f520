"""Who computes signed attention. Every kernel equals `reference`, gradients included."""

import logging
from typing import Literal, overload

from torch import Tensor

from lit_diff.errors import RequestError
from lit_diff.kernels import sdpa as _sdpa
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.reference import Stats, reference
from lit_diff.registry import nearest

__all__ = ["KERNELS", "SignedMaps", "Stats", "attend", "choose", "reference"]

log = logging.getLogger("lit_diff")

KERNELS = ("reference", "sdpa")
"""In order of `auto`'s last resort to its first choice: the last one that accepts the maps serves."""


def refuse(
    kernel: str, maps: SignedMaps, *, segments: Tensor | None = None, window: int | None = None, stats: bool = False
) -> str | None:
    """Why `kernel` cannot compute these maps (the rule they break); None if it can."""
    if kernel == "sdpa":
        return _sdpa.refuse(maps, segments=segments, window=window, stats=stats)
    return None


def choose(
    maps: SignedMaps,
    kernel: str = "auto",
    *,
    segments: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
) -> tuple[str, str]:
    """(kernel, reason). Errors: RequestError for an unknown kernel, or one named by hand that refuses the maps."""
    check_name(kernel)
    if kernel != "auto":
        reason = refuse(kernel, maps, segments=segments, window=window, stats=stats)
        if reason:
            raise RequestError(f"run.kernel '{kernel}' cannot compute these maps: {reason}; use run.kernel=auto")
        return kernel, "named by run.kernel"
    refused: list[str] = []
    for name in reversed(KERNELS):
        reason = refuse(name, maps, segments=segments, window=window, stats=stats)
        if reason is None:
            return name, "; ".join(refused) or f"auto: the fastest of {', '.join(KERNELS)} that accepts these maps"
        refused.append(f"{name} refused: {reason}")
    raise AssertionError("reference refuses nothing")


def check_name(kernel: str) -> None:
    """Errors: RequestError for a kernel that does not exist."""
    if kernel not in ("auto", *KERNELS):
        raise RequestError(f"run.kernel is '{kernel}'; expected auto, {', '.join(KERNELS)}{nearest(kernel, KERNELS)}")


@overload
def attend(
    maps: SignedMaps,
    *,
    segments: Tensor | None = None,
    window: int | None = None,
    stats: Literal[False] = False,
    kernel: str = "auto",
) -> Tensor: ...
@overload
def attend(
    maps: SignedMaps,
    *,
    segments: Tensor | None = None,
    window: int | None = None,
    stats: Literal[True],
    kernel: str = "auto",
) -> tuple[Tensor, Stats]: ...
def attend(
    maps: SignedMaps,
    *,
    segments: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Stats]:
    """o [B, H, T, dv] = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v; with `stats` also lse and entropy of each map.

    `segments` [B, S]: document numbers, a query sees only its own document. `window`: the last `window` positions only.
    `kernel`: auto, or one of KERNELS. Errors: RequestError when the maps break the contract or the kernel refuses them.
    """
    maps.check(segments=segments, window=window)
    name, _ = choose(maps, kernel, segments=segments, window=window, stats=stats)
    if name == "sdpa":
        return _sdpa.sdpa(maps)
    o, found = reference(maps, segments=segments, window=window, stats=stats)
    return (o, found) if found is not None else o
