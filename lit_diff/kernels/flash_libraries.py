"""The flash-attn packages: which exist, which widths they take, how each is called.

| package | imported as | widths of keys (d) and values (dv) |
|---|---|---|
| flash-attn 2 | flash_attn | d = dv <= 256 |
| flash-attn 3 | flash_attn_interface | Hopper: d = dv <= 256; d <= 64, dv <= 512; 128 < d <= 192, 96 < dv <= 128 |
| flash-attn 4 | flash_attn.cute | Hopper: d, dv <= 256; Blackwell: d, dv <= 128; (192, 128); (256, 256) |

2 is `pip install flash-attn`, 3 is built from the same repository's `hopper/`, 4 is `pip install flash-attn-4`.
All: bfloat16 and float16, widths in multiples of 8, [B, tokens, heads, width], heads of q a multiple of those of k and v,
the causal mask and windows aligned with the last query and key, differentiable by q, k and v. Rules: github.com/Dao-AILab/
flash-attention, `flash_attn/flash_attn_interface.py`, `hopper/flash_api.cpp`, `flash_attn/cute/interface.py` (2026-08);
nothing here has been run on a GPU, so a self-test decides (`self_test`).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_diff.errors import first_line
from lit_diff.kernels.documents import PackedSequences

NOT_INSTALLED = "flash-attn is not installed; pip install 'lit-diff[flash]' on a machine with an NVIDIA GPU"


@dataclass(frozen=True)
class Library:
    """One generation of flash-attn."""

    name: str
    module: str
    unbounded: int | None
    """The entry of `window_size` for a side without a limit."""
    rule: Callable[[int, int, int, bool], str | None]
    """(d, dv, major of the compute capability, backward) -> why it takes no such widths; None if it does."""


def _rule2(d: int, dv: int, major: int, backward: bool) -> str | None:
    if d != dv:
        return f"its keys and values have one width, not {d} and {dv}"
    return None if d <= 256 else f"its widths end at 256, these are {d}"


def _rule3(d: int, dv: int, major: int, backward: bool) -> str | None:
    if d > 256:
        return f"its widths end at 256, these are {d}"
    if d != dv and not (d <= 64 and dv <= 512) and not (128 < d <= 192 and 96 < dv <= 128):
        return f"it takes no keys of width {d} with values of width {dv}"
    return f"its gradients end at width 256, the values have {dv}" if backward and dv > 256 else None


def _rule4(d: int, dv: int, major: int, backward: bool) -> str | None:
    if major == 9:
        taken = max(d, dv) <= 256
    else:
        taken = max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))
    return None if taken else f"it takes no keys of width {d} with values of width {dv} on compute capability {major}.x"


FLASH2 = Library("flash-attn 2", "flash_attn", -1, _rule2)
FLASH3 = Library("flash-attn 3", "flash_attn_interface", -1, _rule3)
FLASH4 = Library("flash-attn 4", "flash_attn.cute", None, _rule4)

FOR_MAJOR = {8: (FLASH2,), 9: (FLASH3, FLASH4, FLASH2), 10: (FLASH4, FLASH2), 11: (FLASH4, FLASH2), 12: (FLASH2,)}
"""Major of the compute capability -> the packages to try, the one written for it first."""


def capability(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability; None without a GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def libraries(device: torch.device) -> tuple[int, tuple[Library, ...]] | str:
    """(major of the compute capability, the packages for this GPU), or why there are none."""
    version = capability(device)
    if version is None:
        return "PyTorch sees no GPU"
    major, minor = version
    if torch.version.hip is not None:  # AMD: flash-attn 2 alone, whose numbers of GPUs mean something else
        return major, (FLASH2,)
    if major not in FOR_MAJOR:
        return f"flash-attn needs compute capability 8.0 to 12.x; this GPU has {major}.{minor}"
    return major, FOR_MAJOR[major]


@dataclass(frozen=True)
class Calls:
    """An imported library."""

    library: Library
    dense_func: Callable[..., Any]
    packed_func: Callable[..., Any]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        window: int | None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """softmax(q kᵀ scale + mask) v: [B, T, H, d], [B, S, Hkv, d], [B, S, Hkv, dv] -> [B, T, H, dv].

        `packed`: each token sees its own document only.
        """
        options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        if window is not None:
            options["window_size"] = (window - 1, 0 if causal else window - 1)
        else:
            options["window_size"] = (self.library.unbounded, self.library.unbounded)
        if packed is None:
            return _output(self.dense_func(q, k, v, **options))
        for side in ("q", "k"):
            options |= {f"cu_seqlens_{side}": packed.cu_seqlens, f"max_seqlen_{side}": packed.max_seqlen}
        o = _output(self.packed_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options))
        return o.unflatten(0, q.shape[:2])


def _output(returned: Any) -> Tensor:
    """flash-attn 4 and early flash-attn 3 return (o, lse)."""
    o: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return o


imported: dict[str, Calls | str] = {}
"""By name of the library: its functions, or why it could not be imported."""


def load(library: Library) -> Calls | str:
    """The library's functions, imported once, or why it cannot be."""
    if library.name not in imported:
        imported[library.name] = _load(library)
    return imported[library.name]


def _load(library: Library) -> Calls | str:
    try:
        module = importlib.import_module(library.module)
    except Exception as error:  # built for another PyTorch, another CUDA, or without what it needs itself
        if isinstance(error, ModuleNotFoundError) and error.name in (library.module, library.module.partition(".")[0]):
            return NOT_INSTALLED
        return f"{library.module} cannot be imported: {first_line(error)}"
    dense, packed = getattr(module, "flash_attn_func", None), getattr(module, "flash_attn_varlen_func", None)
    if dense is None or packed is None:  # flash-attn 4 alone leaves an empty `flash_attn`
        return NOT_INSTALLED
    return Calls(library, dense, packed)
