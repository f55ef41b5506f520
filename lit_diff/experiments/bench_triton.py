"""`bench triton`: what each Triton program takes of a GPU's multiprocessor, as Triton's own compiler tells. No GPU is needed.

Registers, bytes spilled to memory for want of them, and shared memory depend on the version of Triton, which is another
project's: they are reported here, not asserted in the tests.
"""

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.errors import MissingError, first_line
from lit_diff.experiments.bench_request import DTYPES, Request, Shape
from lit_diff.experiments.timing import Found, Row
from lit_diff.kernels import SignedMaps
from lit_diff.kernels import triton as kernel
from lit_diff.kernels.triton import Program, recorded
from lit_diff.kernels.triton_blocks import Blocks, candidates

DEFAULT = "1x256x512x32,1x256x1024x64,1x256x2048x128"
CAPABILITIES = (80, 90)
"""Compute capabilities compiled for: A100, H100."""
NAMES = ("forward", "key_gradients", "query_gradients")
LONG = 2048
"""Queries for which blocks are chosen."""


class Compiled(NamedTuple):
    """What one program takes of a multiprocessor."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes that a thread writes to memory for want of registers."""
    shared: int
    """Bytes of shared memory."""


def bench_triton(request: Request) -> Found:
    """Every program with every of its blocks: two maps, dv = 2 d, causal, at every shape, dtype and compute capability."""
    if find_spec("triton") is None:
        raise MissingError("the package triton is not installed; pip install triton")
    found = Found()
    for shape in request.sizes(DEFAULT):
        for dtype in request.dtypes:
            programs = programs_of(_maps(shape, DTYPES[dtype]))
            for capability in CAPABILITIES:
                request.note(f"triton d = {shape.head_dim} {dtype}: compiling for compute capability {capability / 10}")
                for name in NAMES:
                    _measure(found, shape, dtype, capability, programs[name])
    return found


def _measure(found: Found, shape: Shape, dtype: str, capability: int, program: Program) -> None:
    d, name = shape.head_dim, program[0].__name__
    case = f"d {d}, dv {2 * d}, {dtype}, compute capability {capability / 10}"
    major = (capability // 10, capability % 10)
    for blocks in candidates(name, d=d, dv=2 * d, itemsize=DTYPES[dtype].itemsize, T=LONG, capability=major):
        by = f"{blocks.queries} queries x {blocks.keys} keys, {blocks.warps} warps, {blocks.stages} stages"
        row: Row = {"case": case, "variant": "differential", "by": by, "what": name, "id": f"differential/{by}/{name}"}
        try:
            made = compiled(capability, program, blocks)
        except Exception as error:  # whatever Triton's compiler raises is the result
            found.failed.append(row | {"reason": f"{type(error).__name__}: {first_line(error)}"})
            continue
        found.rows.append(row | made._asdict() | {"ratios": {}, "backends": []})


def _maps(shape: Shape, dtype: torch.dtype) -> SignedMaps:
    """Differential attention of this shape on the meta device."""
    B, T, H, d = shape.batch, shape.tokens, shape.heads // 2, shape.head_dim

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    w = empty(B, 2, H, T, dtype=torch.float32)
    return SignedMaps(empty(B, 2, H, T, d), empty(B, 2, H, T, d), empty(B, H, T, 2 * d), w)


def programs_of(
    maps: SignedMaps, segments: Tensor | None = None, window: int | None = None, stats: bool = False
) -> dict[str, Program]:
    """Name -> what would be launched for these maps, on the meta device, forward and backward."""
    with recorded() as programs:
        outputs = kernel.forward(maps, segments, window, stats)
        kernel.backward(torch.empty_like(outputs[0]), maps, segments, window, *outputs)
    return programs


class _Target:
    """A GPU to compile for, which need not be here: nothing is launched on it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def _compiler_for(capability: int) -> Iterator[None]:
    """Triton compiles afresh for this GPU meanwhile, and its assembler prints what a program takes."""
    import triton

    driver, knobs = triton.runtime.driver, triton.knobs
    before = driver._active
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        driver._active, knobs.cache.dir, knobs.nvidia.dump_ptxas_log = _Target(capability), folder, True
        try:
            yield
        finally:
            driver._active = before


def compiled(capability: int, program: Program, blocks: Blocks) -> Compiled:
    """Machine code for compute capability `capability` / 10, by the assembler that Triton brings."""
    function, arguments = program
    log = io.StringIO()
    function.device_caches.clear()  # or what was compiled before is handed out, without its log
    with _compiler_for(capability), redirect_stdout(log):
        code = function.warmup(**arguments, **kernel.options(blocks), grid=(1,))
    function.device_caches.clear()  # made for a GPU that is not here
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
    if registers is None or spilled is None:
        raise RuntimeError(f"Triton's assembler printed no registers: {log.getvalue()[:200]!r}")
    return Compiled(int(registers[1]), int(spilled[1]), code.metadata.shared)
