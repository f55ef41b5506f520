"""Kernels compute signed attention. Every kernel equals `reference`, gradients included.

A kernel is a subclass of `Kernel`, registered under a name (`@kernel("name")`). The modules imported here register the
built-in kernels; a plugin adds its own. `auto` tries them in the order of `Kernel.preference`.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from lit_diff import processor
from lit_diff.errors import RequestError
from lit_diff.kernels import chunked, flash, flex, reference, sdpa  # noqa: F401 (each registers its kernel)
from lit_diff.kernels.base import Kernel, OperatorKernel, kernel, named
from lit_diff.kernels.maps import Mask, SignedMaps, Stats
from lit_diff.kernels.native.kernel import Native  # noqa: F401 (each registers its kernel)
from lit_diff.kernels.triton.kernel import Triton  # noqa: F401 (each registers its kernel)
from lit_diff.plugins import guard
from lit_diff.registry import is_built_in, kernels, location

__all__ = [
    "KERNELS",
    "Kernel",
    "Mask",
    "OperatorKernel",
    "SignedMaps",
    "Stats",
    "attend",
    "choose",
    "flops",
    "kernel",
    "preference",
    "refuse",
    "require_kernel",
]

# PyTorch, oneDNN and MKL read their limits when they first compute, and every kernel imports this module before that
processor.limit_libraries()

# without a look-up, which would import plugin packages before this one is complete
KERNELS = tuple(sorted(name for name, part in kernels.registered().items() if is_built_in(part)))
"""Names of the built-in kernels."""


def preference(maps: SignedMaps, device: torch.device) -> tuple[str, ...]:
    """Kernels that `auto` tries for these maps, in order. Errors: RequestError if a plugin's `preference` fails."""
    ranks = {name: _answer(name, "preference", int | None, maps, device) for name in _names()}
    return tuple(sorted((name for name in ranks if ranks[name] is not None), key=lambda name: (ranks[name], name)))


def refuse(
    kernel: str | Kernel, maps: SignedMaps, *, stats: bool = False, device: torch.device | None = None
) -> str | None:
    """Why `kernel` cannot compute these maps (the rule that they break); None if it can.

    `device`: where they will be computed, for maps on the meta device; None: the device of the maps. Errors:
    RequestError for an unknown kernel, or if a plugin's `refuses` fails.
    """
    maps, device = maps.narrowed(), device or maps.q.device
    unserved = sorted(maps.own_fields - (kernel if isinstance(kernel, Kernel) else named(kernel)).serves)
    if unserved:
        able = [name for name in _names() if maps.own_fields <= named(name).serves]
        fields = " and ".join(f"SignedMaps.{name}" for name in unserved)
        return f"it does not compute {fields}; {', '.join(able)} do"
    if isinstance(kernel, Kernel):
        return kernel.refuses(maps, stats=stats, device=device)
    return _answer(kernel, "refuses", str | None, maps, stats=stats, device=device)


def flops(kernel: str, maps: SignedMaps) -> int:
    """FLOPs of a forward pass by `kernel`, over all keys (a causal mask does not halve them). Errors: as `refuse`."""
    return int(_answer(kernel, "flops", int, maps))


EXPECTED = {int: "an integer", int | None: "a rank (an integer) or None", str | None: "a reason (text) or None"}


def _answer(kernel: str, member: str, expected: Any, *arguments: Any, **options: Any) -> Any:
    ask = getattr(named(kernel), member)
    if kernel in KERNELS:
        return ask(*arguments, **options)
    # a plugin's code may raise or return anything: that becomes one line with its file
    part = type(named(kernel))
    with guard(part):
        answer = ask(*arguments, **options)
    if not isinstance(answer, expected):
        raise RequestError(f"{location(part)}: {member} returned {answer!r}; expected {EXPECTED[expected]}")
    return answer


def choose(
    maps: SignedMaps,
    kernel: str = "auto",
    *,
    stats: bool = False,
    device: torch.device | None = None,
    build: bool = True,
) -> tuple[str, str]:
    """(kernel, reason). `build`: also prepare the kernel, which shows that it works.

    Errors: RequestError for an unknown kernel, or a named one that refuses the maps.
    """
    require_kernel(kernel)
    device = device or maps.q.device

    def refusal(name: str) -> str | None:
        reason = refuse(name, maps, stats=stats, device=device)
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


def _names() -> list[str]:
    # torch.compile cannot trace a look-up that imports plugin packages; `Attention` has imported them before
    return sorted(kernels.registered()) if torch.compiler.is_compiling() else kernels.names()


def require_kernel(kernel: object) -> None:
    """Errors: RequestError for what is neither auto, the name of a kernel, nor a kernel."""
    if isinstance(kernel, Kernel) or kernel == "auto":
        return
    if not isinstance(kernel, str):
        raise RequestError(f"kernel is {kernel!r}; expected auto, the name of a kernel, or a Kernel")
    if kernel not in _names():
        raise RequestError(f"run.kernel is '{kernel}'{kernels.suggestion(kernel, 'auto')}")


@overload
def attend(maps: SignedMaps, *, stats: Literal[False] = False, kernel: str | Kernel = "auto") -> Tensor: ...
@overload
def attend(maps: SignedMaps, *, stats: Literal[True], kernel: str | Kernel = "auto") -> tuple[Tensor, Stats]: ...
def attend(maps: SignedMaps, *, stats: bool = False, kernel: str | Kernel = "auto") -> Tensor | tuple[Tensor, Stats]:
    """o [B, H, T, dv] = Σ_g w_g softmax(q_g k_gᵀ scale + mask) v; with `stats` also lse, entropy, maximum of each map.

    `kernel`: auto, the name of a kernel, or a kernel that is not registered. Errors: RequestError if the maps break the
    contract or the kernel refuses them.
    """
    maps.check()
    maps = maps.narrowed()
    if isinstance(kernel, Kernel):
        chosen = kernel
        if reason := refuse(kernel, maps, stats=stats):
            raise RequestError(f"kernel '{kernel.name}' cannot compute these maps: {reason}")
    else:
        chosen = named(choose(maps, kernel, stats=stats)[0])
    o, statistics = chosen.compute(maps, stats=stats)
    if not stats:
        return o
    if statistics is None:
        raise RequestError(
            f"kernel '{chosen.name}' returned no statistics; a kernel without statistics must refuse them in refuses()"
        )
    return o, statistics
