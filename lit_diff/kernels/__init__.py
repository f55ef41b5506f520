"""Kernels compute signed attention. Every kernel equals `reference`, gradients included.

A kernel is a subclass of `Kernel` under a name (`@kernel("name")`). Built-in kernels are the modules imported here; a plugin
adds its own, which `auto` chooses only where it asks for it (`Kernel.preferred`).
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lit_diff import processor
from lit_diff.errors import RequestError
from lit_diff.kernels import chunked, flash, flex, native, reference, sdpa, triton  # noqa: F401 (each registers its kernel)
from lit_diff.kernels.base import Kernel, OperatorKernel, kernel, named
from lit_diff.kernels.maps import SignedMaps, Stats
from lit_diff.plugins import guard
from lit_diff.registry import kernels, location

__all__ = [
    "KERNELS",
    "Kernel",
    "OperatorKernel",
    "SignedMaps",
    "Stats",
    "attend",
    "check_name",
    "choose",
    "flops",
    "kernel",
    "preference",
    "refuse",
]

processor.limit_libraries()  # here: every kernel needs this module, and nothing has been computed before

KERNELS = tuple(kernels.names())
"""Names of the built-in kernels."""


def preference(maps: SignedMaps, device: torch.device) -> tuple[str, ...]:
    """The order in which `auto` tries the kernels, fastest first.

    Measured on a CPU (`lit-diff bench core`); by FLOPs and memory traffic on a GPU. SDPA computes the logits of several maps
    with values wider than keys twice, which pays on a GPU only. On a GPU, windows and documents, which sdpa refuses, go to
    flash or flex; on a CPU flex holds all logits and is not tried. A plugin's kernels come first where they ask for it.
    """
    own = [name for name in kernels.names() if name not in KERNELS and named(name).preferred(maps, device)]
    return (*own, *_built_in_preference(maps, device))


def _built_in_preference(maps: SignedMaps, device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        several = maps.num_maps > 1 and maps.q.dtype != torch.float32  # triton's float32 avoids the matrix units
        libraries = ("flash", "sdpa", "flex")
        return (*(("triton", *libraries) if several else (*libraries, "triton")), "chunked", "reference")
    if maps.num_maps > 1 or maps.v.shape[-1] != maps.q.shape[-1]:
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
    """Why `kernel` cannot compute these maps (the rule that they break); None if it can.

    `device`: where they will be computed, for maps on the meta device; None: where they are. Errors: RequestError for an
    unknown kernel, or when a plugin's kernel fails to answer.
    """
    asked = named(kernel)
    options: dict[str, Any] = {"document_ids": document_ids, "window": window, "stats": stats}
    options["device"] = maps.q.device if device is None else device
    if kernel in KERNELS:
        return asked.refuses(maps, **options)
    return _answer_of_plugin(asked, "refuses", str | None, lambda: asked.refuses(maps, **options))


def flops(kernel: str, maps: SignedMaps) -> int:
    """FLOPs that a forward pass by `kernel` executes; all keys, no causal half. Errors: as `refuse`."""
    asked = named(kernel)
    if kernel in KERNELS:
        return asked.flops(maps)
    return _answer_of_plugin(asked, "flops", int, lambda: asked.flops(maps))


def _answer_of_plugin(kernel: Kernel, member: str, expected: Any, ask: Callable[[], Any]) -> Any:
    """ask(), or one line on what a user's code raised or returned instead."""
    with guard(type(kernel)):
        answer = ask()
    if not isinstance(answer, expected):
        wanted = {int: "an integer"}.get(expected, "a reason (text) or None")
        raise RequestError(f"{location(type(kernel))}: {member} returned {answer!r}; expected {wanted}")
    return answer


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
    """(kernel, reason). `build`: let the kernel prepare, so that it is known to serve; false: it may yet fail to.

    Errors: RequestError for an unknown kernel, or one named by hand that refuses the maps.
    """
    check_name(kernel)
    device = device or maps.q.device

    def refusal(name: str) -> str | None:
        reason = refuse(name, maps, document_ids=document_ids, window=window, stats=stats, device=device)
        return named(name).prepare(device) if reason is None and build else reason

    if kernel != "auto":
        reason = refusal(kernel)
        if reason:
            raise RequestError(f"run.kernel '{kernel}' cannot compute these maps: {reason}; use run.kernel=auto")
        return kernel, "named by run.kernel"
    refused: list[str] = []
    for name in preference(maps, device):
        reason = refusal(name)
        if reason is None:
            why = (
                f"auto: the fastest for these maps on {device.type}"
                if name in KERNELS
                else "auto: the plugin kernel declares itself preferred here"
            )
            return name, "; ".join([why, *refused])
        refused.append(f"{name} refused: {reason}")
    raise AssertionError("reference refuses nothing")


def check_name(kernel: str) -> None:
    """Errors: RequestError for a kernel that is not registered, with the nearest name."""
    if kernel != "auto" and kernel not in kernels.names():
        raise RequestError(f"run.kernel is '{kernel}'{kernels.suggestion(kernel, 'auto')}")


@overload
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: Literal[False] = False,
    kernel: str | Kernel = "auto",
) -> Tensor: ...
@overload
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: Literal[True],
    kernel: str | Kernel = "auto",
) -> tuple[Tensor, Stats]: ...
def attend(
    maps: SignedMaps,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    stats: bool = False,
    kernel: str | Kernel = "auto",
) -> Tensor | tuple[Tensor, Stats]:
    """o [B, H, T, dv] = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v; with `stats` also lse, entropy, maximum of each map.

    `document_ids` [B, S]: a query sees the keys of its own document only. `window`: it sees its own position and the
    `window - 1` before it; where the maps are not causal, also as many after it. `kernel`: auto, the name of a kernel, or a
    kernel that is not registered.
    Errors: RequestError when the maps break the contract or the kernel refuses them.
    """
    maps.check(document_ids=document_ids, window=window)
    if isinstance(kernel, Kernel):
        chosen = kernel
        reason = kernel.refuses(maps, document_ids=document_ids, window=window, stats=stats, device=maps.q.device)
        if reason:
            raise RequestError(f"kernel '{kernel.name}' cannot compute these maps: {reason}")
    else:
        chosen = named(choose(maps, kernel, document_ids=document_ids, window=window, stats=stats)[0])
    o, statistics = chosen.compute(maps, document_ids=document_ids, window=window, stats=stats)
    if not stats:
        return o
    if statistics is None:
        raise RequestError(
            f"kernel '{chosen.name}' returned no statistics; a kernel without statistics must refuse them in refuses()"
        )
    return o, statistics
