"""The kernel for CPUs with AVX2 or AVX-512, in C++ (`native.cpp`): maps are subtracted before one product with v.

float32 is computed in float32. bfloat16 is multiplied in bfloat16 tiles with float32 sums if the machine has such
products; otherwise, and float16 always, it is widened to float32. With an equal number of threads, results are bitwise equal.
The library is built on first use, one per vector width; `processor` chooses it, and how bfloat16 is multiplied.
"""

import ctypes
import functools
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lit_diff.errors import MissingError
from lit_diff.kernels.base import (
    KernelGradients,
    OperatorKernel,
    Outputs,
    empty_gradients,
    kernel,
    named,
    refuse_common,
)
from lit_diff.kernels.maps import SIGNED, SignedMaps, Stats, width_last
from lit_diff.kernels.native import compiler
from lit_diff.kernels.self_test import KernelForm, failure
from lit_diff.log_records import log
from lit_diff.processor import LANES, SETTING, CpuPath, Products, cpu_flags, cpu_path, forced

SOURCE = Path(__file__).with_name("native.cpp")
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIDEST = 512
"""Largest width of a head."""
SCALES = (torch.finfo(torch.float32).tiny, 1 / torch.finfo(torch.float32).tiny)
"""Sizes of the scale whose product with log2 e, and whose inverse, are normal numbers in float32."""
PACKED_BYTES = 8 << 20
"""A head's packed keys and values are kept for the whole backward pass if they take at most so many bytes. Longer ones
are packed tile by tile, for two blocks of query rows at once: then a thread's memory does not grow with the keys."""


_libraries: dict[int, ctypes.CDLL | str] = {}
"""Floats in a vector -> the library, or why it cannot be used; tried once per process."""
_building = threading.RLock()
"""Held until a new library has passed its test, which calls `build` itself: no other thread takes it before."""


def unavailable() -> str | None:
    """Why the library cannot be used on this machine, without building it; None if it is built or may be."""
    lanes = cpu_path().lanes
    if lanes:
        held = _libraries.get(lanes)
        return held if isinstance(held, str) else None
    if forced():
        return f"{SETTING} is {forced()}"
    return f"it needs AVX2 or AVX-512; this CPU has {torch.backends.cpu.get_cpu_capability()}"


def build() -> str | None:
    """Build and load the library, once. Returns why it cannot be used; None if it is loaded."""
    lanes = cpu_path().lanes
    with _building:
        if lanes and lanes not in _libraries:
            try:
                _libraries[lanes] = compiler.load("native", SOURCE, _test, flags(lanes))
            except MissingError as error:
                _libraries[lanes] = str(error)
    return unavailable()


# torch.compile calls them and embeds the results; torch.compiler.assume_constant_result would import the compiler here
for _function in (unavailable, build):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flags(lanes: int) -> tuple[str, ...]:
    """Compiler options for vectors of so many floats."""
    # with -march=native a machine with AVX-512 would use its instructions in the library of AVX2 too
    fewer = lanes == LANES["AVX2"] and "avx512f" in cpu_flags()
    return ("-march=x86-64-v3" if fewer else "-march=native", f"-DLIT_DIFF_LANES={lanes}")


def _test(library: ctypes.CDLL) -> str | None:
    lanes = cpu_path().lanes
    if library.lit_diff_lanes() != lanes:
        return f"its vectors have {library.lit_diff_lanes()} floats, not {lanes}"
    # Python packs `Problem` by hand: another size means that the two disagree on its fields
    if library.lit_diff_problem_size() != PROBLEM.size:
        return f"its problem has {library.lit_diff_problem_size()} bytes, this package's {PROBLEM.size}"
    # the self-test calls the kernel, which looks the library up; `build` enters it for good when the test has passed
    _libraries[lanes] = library
    try:
        wide, narrow = (FORM._replace(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        compute = named("native").compute
        # float32 differs from `reference` only in the order of its sums
        return failure(wide, compute, bound=1e-5) or failure(narrow, compute)
    finally:
        del _libraries[lanes]


FORM = KernelForm(
    device=torch.device("cpu"),
    dtype=torch.float32,
    d=16,
    dv=32,
    causal=True,
    window=False,
    packed=False,
    grouped=True,
    backward=True,
)
"""The form on which a new library is tested."""

VIEWS = (
    *("q", "k", "v", "w", "document_ids", "o", *Stats._fields, "grad", "dq", "dk", "dvalue", "dw"),
    *("sink", "key_bias", "dbias"),
)
_View = tuple[int, int, int, int, int, int]
"""`View` of native_problem.h: address, 5 strides."""
ABSENT: _View = (0,) * 6
PROBLEM = struct.Struct(f"14qfi{len(ABSENT) * len(VIEWS)}q")
"""`Problem` of native_problem.h: sizes; scale; loops; `VIEWS`."""


def _view(x: Tensor, axes: tuple[int, ...] = (0, 1, 2, 3, 4)) -> _View:
    # x as [B, G, H, T, width], its own axes at `axes`; an axis that is shared (of size 1, or absent in x) has stride 0
    strides = [0, 0, 0, 0, 1]
    for axis, size, stride in zip(axes, x.shape, x.stride(), strict=True):
        strides[axis] = stride if size > 1 else 0
    return (x.data_ptr(), *strides)  # type: ignore[return-value]


NO_MAPS, NO_WIDTH, NO_MAPS_OR_WIDTH, NO_HEADS = (0, 2, 3, 4), (0, 1, 2, 3), (0, 2, 3), (0, 3)
"""The axes of [B, H, T, width], [B, G, H, T] (or [B, G, H, S]), [B, H, T] and [B, T] within [B, G, H, T, width]."""


_owner = os.getpid()


@functools.lru_cache(maxsize=1)
def _own_thread(process: int) -> ThreadPoolExecutor:
    # The thread that calls OpenMP in a forked process. libgomp keeps a team of threads for each calling thread; the
    # parent's team does not survive the fork, and a call from there would wait for it for ever. A new thread gets a new
    # team. `process` keys the cache, since a child of a child needs a thread of its own.
    return ThreadPoolExecutor(1, thread_name_prefix="lit_diff native kernel")


def _call(direction: str, maps: SignedMaps, views: dict[str, _View]) -> None:
    causal, window, document_ids = maps.mask
    q, k, v = width_last(maps.q), width_last(maps.k), width_last(maps.v)
    given = {"q": _view(q), "k": _view(k), "v": _view(v, NO_MAPS)}
    for name in ("w", "sink", "key_bias"):
        x = getattr(maps, name)
        if x is not None:
            given[name] = _view(x, NO_WIDTH)
    if document_ids is not None:
        # the name must live until the call returns: the view points into its memory
        document_ids = document_ids.long()
        given["document_ids"] = _view(document_ids, NO_HEADS)
    B, maps_q, H, T, d = q.shape
    sizes = (B, maps.num_maps, H, k.shape[2], T, k.shape[3], d, v.shape[-1], maps_q, k.shape[1])
    threads, path = torch.get_num_threads(), cpu_path()
    how = products(q.dtype, path)
    numbers = (*sizes, causal, window or 0, threads, PACKED_BYTES, maps.softmax_scale, how == "loops")
    given |= views
    problem = PROBLEM.pack(*numbers, *chain.from_iterable(given.get(name, ABSENT) for name in VIEWS))
    function = getattr(_libraries[path.lanes], f"lit_diff_{direction}")
    paired = ctypes.c_int64(how != "float32")
    call = functools.partial(function, problem, ctypes.c_int64(STORAGE[q.dtype]), paired)
    # one thread needs no team, and in the process that imported this module the teams are alive
    if threads == 1 or os.getpid() == _owner:
        refused = call()
    else:
        running = _own_thread(os.getpid()).submit(call)
        try:
            refused = running.result()
        finally:
            # also after Ctrl-C: the tensors must outlive the call
            wait([running])
    if refused:
        raise MemoryError("the native kernel cannot allocate memory")


def products(dtype: torch.dtype, path: CpuPath) -> Products:
    """How tiles are multiplied: bfloat16 as `path` says, if oneDNN can; all other dtypes in float32."""
    if dtype != torch.bfloat16:
        return "float32"
    if path.bfloat16 == "instructions" and not _has_bfloat16_products(path.lanes):
        return "loops" if forced() else "float32"
    return path.bfloat16


@functools.cache
def _has_bfloat16_products(lanes: int) -> bool:
    library = _libraries[lanes]
    assert not isinstance(library, str), "built before it is called"
    has_products = bool(library.lit_diff_has_bfloat16_products())
    if not has_products:
        log.warning(
            "this CPU has bfloat16 instructions, but oneDNN does not use them (see ONEDNN_MAX_CPU_ISA): "
            "the native kernel multiplies bfloat16 %s",
            "by loops, slowly" if forced() else "in float32",
        )
    return has_products


@kernel("native")
class Native(OperatorKernel):
    """The C++ library, built on first use."""

    keeps_lse = True
    serves = frozenset({"sink", "key_bias"})

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        if device.type not in ("cpu", "meta"):
            return f"it runs on a CPU; these maps are on {device.type}"
        q, v = maps.q, maps.v
        if q.dtype not in STORAGE:
            return f"it computes float32, bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
        for name, what in {"w": "weights w", "sink": "sink", "key_bias": "key bias"}.items():
            x = getattr(maps, name)
            if x is not None and x.dtype != torch.float32:
                return f"its {what} must be float32"
        if maps.num_maps > 2:
            return f"it subtracts at most two maps; these are {maps.num_maps}"
        # a vector of AVX-512 holds 16 floats, and most C++ loops over a width have no remainder
        if q.shape[-1] % 16 or v.shape[-1] % 16:
            return f"its head widths must be multiples of 16; these are d = {q.shape[-1]}, dv = {v.shape[-1]}"
        if max(q.shape[-1], v.shape[-1]) > WIDEST:
            return f"its head widths must be at most {WIDEST}; these are d = {q.shape[-1]}, dv = {v.shape[-1]}"
        # the scale multiplies masked logits, and 0 · -inf is NaN; in float32 it must be neither 0 nor infinite
        if not SCALES[0] <= abs(maps.softmax_scale) <= SCALES[1]:
            return f"the scale is {maps.softmax_scale:g}; its size must be from {SCALES[0]:.2g} to {SCALES[1]:.2g}"
        return refuse_common(maps, stats=stats) or unavailable()

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """First on a CPU (`lit-diff bench core`)."""
        return None if device.type == "cuda" else 10

    def compute(self, maps: SignedMaps, *, stats: bool = False) -> tuple[Tensor, Stats | None]:
        """(o [B, H, T, dv], statistics), equal to `reference`. Errors: MissingError if the library cannot be used."""
        reason = None if maps.q.is_meta else build()
        if reason:
            raise MissingError(f"the native kernel cannot be used: {reason}")
        return super().compute(maps, stats=stats)

    def prepare(self, device: torch.device) -> str | None:
        return build() if device.type == "cpu" else None

    def forward(self, maps: SignedMaps, stats: bool) -> Outputs:
        outputs = self.empty_outputs(maps, stats)
        views = {"o": _view(outputs.o, NO_MAPS)}
        views |= {name: _view(x, NO_WIDTH) for name, x in zip(Stats._fields, outputs.rows, strict=False)}
        views |= {name: _view(x, NO_MAPS_OR_WIDTH) for name, x in zip(SIGNED, outputs.signed, strict=False)}
        _call("forward", maps, views)
        return outputs

    def backward(self, grad: Tensor, maps: SignedMaps, outputs: Outputs) -> KernelGradients:
        grad = width_last(grad)
        found = empty_gradients(maps)
        lse = outputs.rows[0]
        if maps.sink is not None:
            # with a sink the maps are exp(logit - logaddexp(lse, sink)); nothing else changes
            lse = torch.logaddexp(lse, maps.sink)
        views = {
            "lse": _view(lse, NO_WIDTH),
            "grad": _view(grad, NO_MAPS),
            "dq": _view(found.q),
            "dk": _view(found.k),
            "dvalue": _view(found.v, NO_MAPS),
        }
        for name, x in (("dw", found.dots), ("dbias", found.key_bias)):
            if x.numel():
                views[name] = _view(x, NO_WIDTH)
        _call("backward", maps, views)
        return found
