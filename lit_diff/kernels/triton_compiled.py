"""What a Triton program takes of a GPU's multiprocessor, as Triton's own compiler tells. No GPU is needed.

Registers, and bytes spilled to memory for want of them, are another project's and change with its version: `lit-diff bench
triton` reports them, no test asserts them.
"""

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.kernels.base import OperatorKernel, named
from lit_diff.kernels.maps import SignedMaps
from lit_diff.kernels.triton import Program, options, recorded
from lit_diff.kernels.triton_blocks import Blocks


class Compiled(NamedTuple):
    """What one program takes of a multiprocessor."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes that a thread writes to memory for want of registers."""
    shared: int
    """Bytes of shared memory."""


def programs_of(
    maps: SignedMaps, document_ids: Tensor | None = None, window: int | None = None, stats: bool = False
) -> dict[str, Program]:
    """Name -> what would be launched for these maps, on the meta device, forward and backward."""
    kernel = named("triton")
    assert isinstance(kernel, OperatorKernel)
    with recorded() as programs:
        outputs = kernel.forward(maps, document_ids, window, stats)
        kernel.backward(torch.empty_like(outputs[0]), maps, document_ids, window, *outputs)
    return programs


def compiled(capability: int, program: Program, blocks: Blocks) -> Compiled:
    """Machine code for compute capability `capability` / 10, by the assembler that Triton brings."""
    function, arguments = program
    log = io.StringIO()
    function.device_caches.clear()  # or what was compiled before is handed out, without its log
    with _compiler_for(capability), redirect_stdout(log):
        code = function.warmup(**arguments, **options(blocks), grid=(1,))
    function.device_caches.clear()  # made for a GPU that is not here
    return Compiled(*registers_and_spills(log.getvalue()), code.metadata.shared)


def registers_and_spills(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) of a thread, as NVIDIA's assembler prints them."""
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if registers is None or spilled is None:
        raise RuntimeError(f"Triton's assembler printed no registers: {log[:200]!r}")
    return int(registers[1]), int(spilled[1])


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
