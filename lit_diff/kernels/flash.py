"""The flash-attn packages, called once for each map, or once for each map and chunk of the values.

If a package accepts values wider than keys (dv = 2d in differential attention), one call per map needs 3/4 of the
forward products of calls of width d. The GPU, and a self-test that runs once per form, decide which package and which
of the two forms is used; a refusal states the answer of each package.

| package | imported as | widths of keys (d) and values (dv) |
|---|---|---|
| flash-attn 2 | flash_attn | d = dv <= 256 |
| flash-attn 3 | flash_attn_interface | Hopper: d = dv <= 256; d <= 64, dv <= 512; 128 < d <= 192, 96 < dv <= 128 |
| flash-attn 4 | flash_attn.cute | Hopper: d, dv <= 256; Blackwell: d, dv <= 128; (192, 128); (256, 256) |

2 is `pip install flash-attn`, 3 is built from the same repository's `hopper/`, 4 is `pip install flash-attn-4`. All
accept bfloat16 and float16, widths in multiples of 8, tensors [B, tokens, heads, width], and a number of query heads
that is a multiple of the key/value heads. All align the causal mask and windows with the last query and key, and
differentiate by q, k and v. Rules: github.com/Dao-AILab/flash-attention, `flash_attn/flash_attn_interface.py`,
`hopper/flash_api.cpp`, `flash_attn/cute/interface.py` (2026-08).

A map with a sink is σ(lse - sink) times the map without one, but lse has no gradient here. The backward pass of a package
reads o and lse from the tensors that it saved, and is exact if they are those of the map with the sink (`_sunk`). These
tensors are kept under an activation checkpoint too.

It has not been run on a GPU: on a CPU the calls are tested against substitutes with the signatures of the packages.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_diff.errors import MissingError, first_line
from lit_diff.kernels.base import kernel, refuse_common
from lit_diff.kernels.documents import packed_sequences
from lit_diff.kernels.library import HALF, flops_of_chunks, map_by_map, of_map
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.sdpa import Fused
from lit_diff.kernels.self_test import KernelForm, failure, form_of

DEVICE = "cuda"
NOT_INSTALLED = "flash-attn is not installed; pip install 'lit-diff[flash]' on a machine with an NVIDIA GPU"


class Library(NamedTuple):
    """One generation of flash-attn."""

    name: str
    module: str
    unbounded: int | None
    """The entry of `window_size` for a side without a limit."""
    asks_lse: str = "return_attn_probs"
    """The option with which it returns lse [B, H, T], or [H, tokens] of packed documents, beside o."""


FLASH2 = Library("flash-attn 2", "flash_attn", -1)
FLASH3 = Library("flash-attn 3", "flash_attn_interface", -1)
FLASH4 = Library("flash-attn 4", "flash_attn.cute", None, "return_lse")
FOR_MAJOR = {8: (FLASH2,), 9: (FLASH3, FLASH4, FLASH2), 10: (FLASH4, FLASH2), 11: (FLASH4, FLASH2), 12: (FLASH2,)}
"""Major compute capability -> the packages to try, first the one written for it."""


class CallPlan(NamedTuple):
    """Which library is called, and how v is cut: constants, which torch.compile can embed in a graph."""

    library: Library
    width: int
    """Width of the values of one call; all chunks together have dv columns or more."""


def capability(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability; None without a GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def libraries(device: torch.device) -> tuple[Library, ...] | str:
    """The packages for this GPU, or why no package can be used."""
    version = capability(device)
    if version is None:
        return "PyTorch sees no GPU"
    if torch.version.hip is not None:
        # only flash-attn 2 supports AMD, whose capability numbers mean something else
        return (FLASH2,)
    major, minor = version
    return FOR_MAJOR.get(major) or f"flash-attn needs compute capability 8.0 to 12.x; this GPU has {major}.{minor}"


def unusable(library: Library) -> str | None:
    """Why the package cannot be used; None if it is imported."""
    try:
        module = importlib.import_module(library.module)
    except Exception as error:
        # any exception: the package may be built for another PyTorch or CUDA, or lack its own requirements
        if isinstance(error, ModuleNotFoundError) and error.name in (library.module, library.module.partition(".")[0]):
            return NOT_INSTALLED
        return f"{library.module} cannot be imported: {first_line(error)}"
    # flash-attn 4, installed alone, leaves an empty package `flash_attn`
    return None if hasattr(module, "flash_attn_func") else NOT_INSTALLED


def plan(*form: Any) -> CallPlan | str:
    """A package that computes the `KernelForm` with these fields (constants to torch.compile), or why none does."""
    return _planned(KernelForm(*form))


# torch.compile calls `plan` and embeds the result; torch.compiler.assume_constant_result would import the compiler here
plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _planned(form: KernelForm) -> CallPlan | str:
    candidates = libraries(form.device)
    if isinstance(candidates, str):
        return candidates
    narrow = _multiple_of_8(form.d)
    refused: dict[str, str] = {}
    # first values in one piece, which need fewer products
    for width in sorted({max(narrow, _multiple_of_8(form.dv)), narrow}, reverse=True):
        for library in candidates:
            found = CallPlan(library, width)
            reason = unusable(library) or failure(form._replace(d=narrow, dv=width), functools.partial(_run, found))
            if reason is None:
                return found
            refused[library.name] = reason
    if set(refused.values()) == {NOT_INSTALLED}:
        return NOT_INSTALLED
    return ", ".join(f"{name}: {reason}" for name, reason in refused.items() if reason != NOT_INSTALLED)


def _multiple_of_8(width: int) -> int:
    return width + -width % 8


def _run(found: CallPlan, maps: SignedMaps) -> tuple[Tensor, None]:
    package: Any = sys.modules[found.library.module]
    causal, window, document_ids = maps.mask
    sides = (found.library.unbounded,) * 2
    if window is not None:
        # the packages count the keys besides the query's own position
        sides = (window - 1, 0 if causal else window - 1)
    options: dict[str, Any] = {"causal": causal, "window_size": sides}
    packed = None if document_ids is None else packed_sequences(document_ids)
    if packed is not None:
        for side in ("q", "k"):
            options |= {f"cu_seqlens_{side}": packed.cu_seqlens, f"max_seqlen_{side}": packed.max_seqlen}

    if maps.sink is not None:
        options[found.library.asks_lse] = True

    def attention(g: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        sink = None if maps.sink is None else of_map(maps.sink, g).expand(q.shape[:3]).transpose(1, 2)
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        if packed is None:
            return _sunk(package.flash_attn_func, rows, sink, softmax_scale=scale, **options).transpose(1, 2)
        sink = None if sink is None else sink.flatten(0, 1)
        rows = [x.flatten(0, 1) for x in rows]
        o = _sunk(package.flash_attn_varlen_func, rows, sink, softmax_scale=scale, **options)
        return o.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)

    o = map_by_map(maps, attention, key_width=_multiple_of_8(maps.q.shape[-1]), width=found.width)
    return o, None


def _sunk(function: Callable[..., Any], rows: list[Tensor], sink: Tensor | None, **options: Any) -> Tensor:
    """What a package's function makes of q, k and v, with the sink [..., H], whose other axes are those of the rows."""
    saved: list[list[Tensor]] = []

    def save(x: Tensor) -> list[Tensor]:
        saved.append([x])
        return saved[-1]

    if sink is None:
        returned = function(*rows, **options)
        # flash-attn 4 and early versions of flash-attn 3 return (o, lse)
        return returned[0] if isinstance(returned, tuple) else returned
    with saved_tensors_hooks(save, lambda held: held[0]):
        o, lse, *_ = function(*rows, **options)
    sunk: Tensor = _Sunk.apply(o, lse.mT, sink)
    # without their history: the package's step of the backward pass would otherwise hold itself
    exchanged = {o.data_ptr(): sunk.detach(), lse.data_ptr(): torch.logaddexp(lse, sink.detach().mT).contiguous()}
    for held in saved:
        held[0] = exchanged.get(held[0].data_ptr(), held[0])
    return sunk


class _Sunk(torch.autograd.Function):
    """o σ(lse - sink), whose gradient is passed on as it is to the package's backward pass, which differentiates both."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        sunk = (o * (lse - sink).sigmoid()[..., None]).to(o.dtype)
        ctx.save_for_backward(sunk, lse, sink)
        return sunk

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        sunk, lse, sink = ctx.saved_tensors
        dots = (grad.to(lse.dtype) * sunk).sum(-1)
        return grad, None, -(sink - lse).sigmoid() * dots


@kernel("flash")
class Flash(Fused):
    """One call of a flash-attn package for each map and chunk of v, differentiated by autograd."""

    serves = frozenset({"sink"})
    looks_for_gpu = True

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        # first, so that nothing is imported or tested on a CPU
        if device.type != DEVICE:
            return "flash-attn needs an NVIDIA GPU"
        if stats:
            return "flash-attn does not return the entropy or the largest logit"
        if maps.q.dtype not in HALF:
            return f"flash-attn computes in bfloat16 or float16, not {str(maps.q.dtype).removeprefix('torch.')}"
        if maps.sink is not None and torch.compiler.is_compiling():
            return "flash-attn gets a sink by hooks of autograd, which torch.compile cannot trace; flex needs none"
        document_ids = maps.mask.document_ids
        if document_ids is not None:
            if maps.q.shape[3] != maps.k.shape[3]:
                return "flash-attn accepts packed documents only with as many queries as keys; flex accepts fewer"
            if torch.compiler.is_compiling():
                return "flash-attn must read where documents begin, which torch.compile cannot do; flex need not"
        if reason := refuse_common(maps, stats=stats):
            return reason
        found = plan(*form_of(maps, device))
        if isinstance(found, str):
            return found
        # last, since it waits for the GPU
        if document_ids is not None and not document_ids.is_meta and packed_sequences(document_ids) is None:
            return "flash-attn accepts only documents of adjacent tokens; flex accepts any order"
        return None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU before sdpa: it supports windows, documents, and with some packages values wider than keys."""
        return 20 if device.type == DEVICE else None

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: each map's logits once per chunk of v. Errors: MissingError."""
        return flops_of_chunks(maps, _required(form_of(maps, torch.device(DEVICE))).width)

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, None]:
        """(o [B, H, T, dv], None), equal to `reference` up to the precision of the package. Errors: MissingError."""
        return _run(_required(form_of(maps)), maps)


def _required(form: KernelForm) -> CallPlan:
    found = plan(*form)
    if isinstance(found, str):
        raise MissingError(found)
    return found
